// Runs a kernel on the host, after emulated.h: all programs of a line by turns, since they may wait for each other.
// The argument is what a kernel of a GPU would get, with addresses of this process.

void begin_program() {}
void end_kernels_before() {}
static const ARGUMENT* given_argument;
extern "C" int run(const void* argument, int programs, int lines, int number) {
    given_argument = (const ARGUMENT*)argument, at_once = number % 2, seed = number;
    return run_grid({programs, lines, 1}, []() { KERNEL(*given_argument); }, lines == 1);
}
