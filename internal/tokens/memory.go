package tokens

/*
#cgo CFLAGS: -D_GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#ifdef __GLIBC__
#include <link.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

static void bound_arenas(int processors) {
#ifdef __GLIBC__
	mallopt(M_ARENA_MAX, processors);
#endif
}

static void read_in_pages(void) {
#ifdef __GLIBC__
	mallopt(M_MMAP_THRESHOLD, 64 << 10);
#endif
}

static void trim_memory(void) {
#ifdef __GLIBC__
	malloc_trim(0);
	mallopt(M_MMAP_THRESHOLD, 4 << 20);
	mallopt(M_TRIM_THRESHOLD, 8 << 20);
#endif
}

#ifdef __GLIBC__
static int unmap_segments(struct dl_phdr_info *info, size_t size, void *data) {
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		uintptr_t start = (info->dlpi_addr + p->p_vaddr + page - 1) / page * page;
		uintptr_t end = (info->dlpi_addr + p->p_vaddr + p->p_memsz) / page * page;
		if (p->p_type == PT_LOAD && !(p->p_flags & PF_W) && end > start) {
			madvise((void *)start, end - start, MADV_DONTNEED);
		}
	}
	return 1; // the first object is the program
}
#endif

static void unmap_startup(void) {
#ifdef __GLIBC__
	dl_iterate_phdr(unmap_segments, NULL);
#endif
}
*/
import "C"

import (
	"runtime"
	"runtime/debug"
)

// boundArenas bounds what glibc's malloc keeps back for each thread: its default is
// eight times as many arenas as processors, each with memory that it never returns.
func boundArenas() { C.bound_arenas(C.int(runtime.NumCPU())) }

// readInPages has each large table in pages of its own while a tokenizer is read, so
// that those which are freed leave no holes between those which stay.
func readInPages() { C.read_in_pages() }

// trimMemory returns what reading a tokenizer has left free. From here on texts and
// their tokens come from memory that is kept.
func trimMemory() {
	C.trim_memory()
	debug.FreeOSMemory()
}

// ReleaseStartup takes out of the resident memory what only starting needs: the code
// and the constants of this program. What is needed again comes back from the system's
// cache of files, page by page. It does nothing where libc is not glibc.
func ReleaseStartup() { C.unmap_startup() }
