"""The documented example runs as it stands, and generates what the original model does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from qsa_trt.recording import open_session
from tests.support.originals import MODELS
from tests.support.requirements import needs_onnxruntime

DOCUMENT = Path(__file__).parents[3] / "docs" / "runtime.md"


@needs_onnxruntime
def test_the_example_generates_the_tokens_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    shutil.copytree(MODELS, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)
    texts, lengths, prompts = names["texts"], names["lengths"], names["prompts"]
    assert isinstance(texts, list) and isinstance(lengths, list) and isinstance(prompts, np.ndarray)
    assert capsys.readouterr().out == f"{texts} 6 of 8 pages are free\n"
    original = open_session(__import__("onnx").load(str(MODELS / "qsa_lm.onnx")))
    for row, text in ((0, texts[0]), (1, texts[1]), (0, texts[2])):
        ids = prompts[row, : lengths[row]].tolist()
        whole = np.array([[*ids, *text]])  # [1, prompt + 11]
        feeds = {"input_ids": whole, "attention_mask": np.ones_like(whole)}
        (logits,) = original.run(["logits"], feeds)
        greedy = logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
        assert text[1:] == greedy[1:], "every token is the one that the original finds likeliest after those before it"
