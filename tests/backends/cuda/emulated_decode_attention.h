// Runs decode_attention.cu on the host, behind emulated.h: it reads arrays and sizes from a file, and writes what
// comes of them.

static std::vector<char> read_part(FILE* file) {
    u64 bytes;
    if (fread(&bytes, 8, 1, file) != 1) abort();
    std::vector<char> part(bytes);
    if (bytes && fread(part.data(), 1, bytes, file) != bytes) abort();
    return part;
}
static std::vector<char> parts[14];
static Arguments arguments;
static void set_fresh(bool there) {  // keys and values of this pass
    const int* slot_mapping = (const int*)parts[12].data();
    int line = KV_HEADS * DIM * 2;
    for (size_t i = 0; i < parts[12].size() / 4; i++)
        for (int which = 0; which < 2; which++) {
            char* to = parts[1 + which].data() + (size_t)slot_mapping[i] * line;
            if (there) memcpy(to, parts[10 + which].data() + i * line, line);
            else memset(to, 0xff, line);  // no number
        }
}
void begin_program() { set_fresh(false); }
void end_kernels_before() { set_fresh(true); }
int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    for (auto& part : parts) part = read_part(file);
    const int* sizes = (const int*)parts[13].data();
    std::vector<u16> output(sizes[6] * HEADS * DIM, 0x7fff);
    size_t lines = (size_t)sizes[6] * HEADS * sizes[2];
    std::vector<float> mixed(lines * DIM), totals(lines * 2);
    std::vector<u32> counters(sizes[6] * KV_HEADS);
    auto numbers = [&](int i) { return (const int*)parts[i].data(); };
    int slots = parts[1].size() / (2 * KV_HEADS * DIM);
    Map keys = {(u16*)parts[1].data(), 3, {DIM, KV_HEADS, slots}, {64, 1, LINES}, {DIM, KV_HEADS * DIM}};
    Map values = keys;
    values.numbers = (u16*)parts[2].data();
    arguments = {keys, values, (u16*)parts[0].data(), output.data(), numbers(3), numbers(4), numbers(5), numbers(6),
                 numbers(7), numbers(8), nullptr, mixed.data(), totals.data(), counters.data(), sizes[0], sizes[1],
                 sizes[7], sizes[5], sizes[2], HEADS * DIM, sizes[3], sizes[4]};
    at_once = !arguments.settled;  // one way each
    auto run = [&]() { return run_grid({sizes[9], 1, 1}, []() { decode_attention(arguments); }); };
    if (!run()) return 4;
    for (u32 count : counters) if (count) return 3;
    if (sizes[8]) {  // again with the partials of the first KV chunks as they are now, and no others
        std::vector<int> shared_chunks(parts[6].size() / 4, sizes[8]);
        for (size_t i = 0; i < lines; i++)
            if ((int)(i % sizes[2]) >= sizes[8]) {
                std::fill_n(mixed.begin() + i * DIM, DIM, NAN);
                std::fill_n(totals.begin() + i * 2, 2, NAN);
            }
        std::vector<u16> before = output;
        std::fill(output.begin(), output.end(), 0x7fff);
        arguments.shared_chunks = shared_chunks.data();
        if (!run()) return 4;
        for (u32 count : counters) if (count) return 3;
        if (output != before) return 5;
    }
    file = fopen(names[2], "wb");
    fwrite(output.data(), 2, output.size(), file);
    fclose(file);
}
