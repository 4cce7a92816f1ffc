/* Lets a process run instructions of Intel's AMX on a processor that has none.

Such an instruction raises SIGILL. The handler decodes it, does to memory and to the thread's tiles what Intel's manual says
(volume 2 of the Software Developer's Manual), and goes on after it. What the manual makes an exception ends the process with
a message, so that wrong sizes of tiles are not overlooked. All else runs as it is. */

#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

typedef struct {
    int configured;
    int rows[TILES], bytes[TILES];
    uint8_t data[TILES][ROWS][ROW_BYTES];
} State;

static __thread State *state __attribute__((tls_model("initial-exec")));
static struct sigaction before;

enum { CONFIGURE, RELEASE, ZERO, LOAD, STORE, BF16, INT8, KINDS };
static long counts[KINDS];

static void fail(const char *what) {
    fprintf(stderr, "AMX emulator: %s\n", what);
    abort();
}

static State *of_thread(void) {
    if (!state) {
        void *memory = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for a thread's tiles");
        state = memory;
    }
    return state;
}

static void configure(State *s, const uint8_t *sizes) {
    memset(s, 0, sizeof *s);
    if (sizes[0] == 0) return;
    if (sizes[0] != 1) fail("ldtilecfg: a palette other than 1");
    for (int at = 1; at < 64; at++)
        if ((at < 16 || (at >= 32 && at < 48) || at >= 56) && sizes[at]) fail("ldtilecfg: a reserved byte is not 0");
    for (int tile = 0; tile < TILES; tile++) {
        s->bytes[tile] = sizes[16 + 2 * tile] | sizes[17 + 2 * tile] << 8;
        s->rows[tile] = sizes[48 + tile];
        if (s->bytes[tile] > ROW_BYTES || s->rows[tile] > ROWS) fail("ldtilecfg: a tile is too large");
        if (!s->bytes[tile] != !s->rows[tile]) fail("ldtilecfg: a tile has rows without bytes, or bytes without rows");
    }
    s->configured = 1;
}

static void check(const State *s, int tile) {
    if (!s->configured) fail("no tiles are configured");
    if (!s->rows[tile]) fail("a tile has no size");
}

/* A product may only meet tiles whose sizes fit, all different. */
static void check_product(const State *s, int sum, int left, int right) {
    check(s, sum), check(s, left), check(s, right);
    if (sum == left || sum == right || left == right) fail("a product of tiles that are not different");
    if (s->bytes[sum] & 3 || s->bytes[left] & 3 || s->bytes[right] & 3) fail("a product of rows of no whole words");
    if (s->rows[left] != s->rows[sum] || s->bytes[right] != s->bytes[sum] || s->bytes[left] != 4 * s->rows[right])
        fail("a product of tiles whose sizes do not fit");
}

static float widened(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Odd and even inputs have sums of their own, which meet at the end; denormal numbers are 0. */
static void multiply_bf16(State *s, int sum, int left, int right) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9FC0);
    for (int row = 0; row < s->rows[sum]; row++)
        for (int column = 0; column < s->bytes[sum] / 4; column++) {
            volatile float even = 0, odd = 0, total;
            for (int k = 0; k < s->bytes[left] / 4; k++) {
                const uint8_t *a = &s->data[left][row][4 * k], *b = &s->data[right][k][4 * column];
                even = fmaf(widened(a), widened(b), even);
                odd = fmaf(widened(a + 2), widened(b + 2), odd);
            }
            memcpy((void *)&total, &s->data[sum][row][4 * column], 4);
            even = even + odd;
            total = total + even;
            memcpy(&s->data[sum][row][4 * column], (void *)&total, 4);
        }
    _mm_setcsr(mode);
}

static void multiply_int8(State *s, int sum, int left, int right, int left_signed, int right_signed) {
    for (int row = 0; row < s->rows[sum]; row++)
        for (int column = 0; column < s->bytes[sum] / 4; column++) {
            uint32_t total;
            memcpy(&total, &s->data[sum][row][4 * column], 4);
            for (int k = 0; k < s->bytes[left]; k++) {
                uint8_t a = s->data[left][row][k], b = s->data[right][k / 4][4 * column + k % 4];
                total += (uint32_t)((left_signed ? (int8_t)a : a) * (right_signed ? (int8_t)b : b));
            }
            memcpy(&s->data[sum][row][4 * column], &total, 4);
        }
}

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* Read the operand in memory after a ModRM byte: its address, and what an index register adds for each row. Returns the
bytes of ModRM, SIB and displacement. */
static int memory_operand(const uint8_t *code, const greg_t *registers, int rex_x, int rex_b, uint8_t **address,
                          int64_t *stride) {
    int mod = code[0] >> 6, base = code[0] & 7, length = 1;
    int64_t at = 0;
    *stride = 0;
    if (base == 4) {
        int sib = code[length++], index = (sib >> 3 & 7) | rex_x << 3;
        base = sib & 7;
        if (index != 4) *stride = (int64_t)((uint64_t)registers[REGISTERS[index]] << (sib >> 6));
        if (base == 5 && mod == 0) mod = 2;
        else at = registers[REGISTERS[base | rex_b << 3]];
    } else if (base == 5 && mod == 0) {
        int32_t further;
        memcpy(&further, code + 1, 4);
        *address = (uint8_t *)(uintptr_t)(code + 5 + further);
        return 5;
    } else {
        at = registers[REGISTERS[base | rex_b << 3]];
    }
    if (mod == 1) at += (int8_t)code[length++];
    if (mod == 2) {
        int32_t further;
        memcpy(&further, code + length, 4);
        at += further, length += 4;
    }
    *address = (uint8_t *)(uintptr_t)at;
    return length;
}

/* Do what the instruction at `code` says, and return its length; 0 if it is none of AMX. */
static int emulate(const uint8_t *code, const greg_t *registers) {
    enum { NONE, P66, PF3, PF2 };
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || code[2] & 0x84) return 0;
    int rex_x = !(code[1] & 0x40), rex_b = !(code[1] & 0x20), prefix = code[2] & 3, third = ~code[2] >> 3 & 15;
    int modrm = code[4], reg = modrm >> 3 & 7, rm = modrm & 7, in_memory = modrm >> 6 != 3;
    uint8_t *address = NULL;
    int64_t stride = 0;
    int length = 4 + (in_memory ? memory_operand(code + 4, registers, rex_x, rex_b, &address, &stride) : 1);
    State *s = of_thread();
    switch (code[3]) {
    case 0x49:
        if (prefix == NONE && in_memory && reg == 0) {
            __atomic_add_fetch(&counts[CONFIGURE], 1, __ATOMIC_RELAXED);
            configure(s, address);
        } else if (prefix == NONE && modrm == 0xC0) {
            __atomic_add_fetch(&counts[RELEASE], 1, __ATOMIC_RELAXED);
            memset(s, 0, sizeof *s);
        } else if (prefix == PF2 && !in_memory) {
            __atomic_add_fetch(&counts[ZERO], 1, __ATOMIC_RELAXED);
            check(s, reg);
            memset(s->data[reg], 0, sizeof s->data[reg]);
        } else {
            return 0;
        }
        return length;
    case 0x4B:
        if (!in_memory || rm != 4 || prefix == NONE) return 0;
        check(s, reg);
        if (prefix == PF3) {
            __atomic_add_fetch(&counts[STORE], 1, __ATOMIC_RELAXED);
            for (int row = 0; row < s->rows[reg]; row++) memcpy(address + row * stride, s->data[reg][row], s->bytes[reg]);
        } else {
            __atomic_add_fetch(&counts[LOAD], 1, __ATOMIC_RELAXED);
            memset(s->data[reg], 0, sizeof s->data[reg]);
            for (int row = 0; row < s->rows[reg]; row++) memcpy(s->data[reg][row], address + row * stride, s->bytes[reg]);
        }
        return length;
    case 0x5C:
        if (in_memory || prefix != PF3) return 0;
        __atomic_add_fetch(&counts[BF16], 1, __ATOMIC_RELAXED);
        check_product(s, reg, rm, third);
        multiply_bf16(s, reg, rm, third);
        return length;
    case 0x5E:
        if (in_memory) return 0;
        __atomic_add_fetch(&counts[INT8], 1, __ATOMIC_RELAXED);
        check_product(s, reg, rm, third);
        multiply_int8(s, reg, rm, third, prefix == PF2 || prefix == PF3, prefix == PF2 || prefix == P66);
        return length;
    }
    return 0;
}

static void on_illegal(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int length = emulate((const uint8_t *)(uintptr_t)registers[REG_RIP], registers);
    if (length) {
        registers[REG_RIP] += length;
        return;
    }
    sigaction(number, &before, NULL); /* the instruction runs again, and meets who waited for the signal before */
}

/* Emulate from now on, in all threads. */
void amx_begin(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    sigaction(SIGILL, &action, &before);
}

/* Give how many instructions were emulated: sizes, releases, zeros, loads, stores, products of bfloat16 and of bytes. */
void amx_counts(long to[KINDS]) { memcpy(to, counts, sizeof counts); }
