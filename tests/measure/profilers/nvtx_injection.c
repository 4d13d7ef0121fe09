/* Listens to NVTX where no profiler is: writes "+ THREAD NAME" for each range that opens and "- THREAD" for each that
   closes to the file that NVTX_LOG names. NVTX_INJECTION64_PATH loads it; the interface is version 2 of NVTX's injection
   API (nvtxTypes.h and nvtxImpl.h of NVTX v3), of which only what is used is declared here. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CALLBACKS = 1 };                                       /* the export table that hands out modules */
enum { CORE = 1, CORE2 = 5 };                                 /* modules */
enum { PUSH_EX = 8, PUSH_A = 9, POP = 11 };                   /* of CORE */
enum { DOMAIN_PUSH_EX = 4, DOMAIN_POP = 5, REGISTER_A = 10 }; /* of CORE2 */
enum { ASCII = 1, REGISTERED = 3 };                           /* kinds of message */

typedef void (*function)(void);
typedef struct {
    size_t size;
    int (*module)(int number, function ***table, unsigned *entries);
} callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
} attributes;

static FILE *log_file;

static int opened(const char *name) {
    fprintf(log_file, "+ %ld %s\n", syscall(SYS_gettid), name);
    return fflush(log_file);
}
static int closed(void) {
    fprintf(log_file, "- %ld\n", syscall(SYS_gettid));
    return fflush(log_file);
}
static int push_ex(const attributes *range) {
    int known = range->message_type == ASCII || range->message_type == REGISTERED;
    return opened(known ? range->message : "?");
}
static int domain_push_ex(void *domain, const attributes *range) { return (void)domain, push_ex(range); }
static int domain_pop(void *domain) { return (void)domain, closed(); }
static const char *register_a(void *domain, const char *text) { return (void)domain, strdup(text); }

static void listen_to(function **table, unsigned entries, unsigned number, function listener) {
    if (number < entries) *table[number] = listener;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const callbacks *found = export_table(CALLBACKS);
    function **table;
    unsigned entries;
    if (!found || !getenv("NVTX_LOG") || !(log_file = fopen(getenv("NVTX_LOG"), "a"))) return 0;
    if (!found->module(CORE, &table, &entries)) return 0;
    listen_to(table, entries, PUSH_EX, (function)push_ex);
    listen_to(table, entries, PUSH_A, (function)opened);
    listen_to(table, entries, POP, (function)closed);
    if (!found->module(CORE2, &table, &entries)) return 0;
    listen_to(table, entries, DOMAIN_PUSH_EX, (function)domain_push_ex);
    listen_to(table, entries, DOMAIN_POP, (function)domain_pop);
    listen_to(table, entries, REGISTER_A, (function)register_a);
    return 1;
}
