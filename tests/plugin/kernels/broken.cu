// Does not compile: what the compiler says of it has to reach the user in one line.
extern "C" __global__ void broken() { int x = nonsense; }
