// Runs fused_layer.cu or logits.cu on the host, after emulated.h: all programs by turns, since they wait for each other.
// The argument is what a kernel of a GPU would get, with addresses of this process.

void begin_program() {}
void end_kernels_before() {}
static const ARGUMENT* given_argument;
extern "C" int run(const void* argument, int programs, int number) {
    given_argument = (const ARGUMENT*)argument, at_once = number % 2, seed = number;
    return run_grid({programs, 1, 1}, []() { KERNEL(*given_argument); }, true);
}
