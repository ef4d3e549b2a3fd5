//go:build cgo

package library

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

// BoundArenas implements native.Library.
func (Library) BoundArenas() { C.bound_arenas(C.int(runtime.NumCPU())) }

// ReadInPages implements native.Library.
func (Library) ReadInPages() (done func()) {
	C.read_in_pages()
	return func() {
		C.trim_memory()
		debug.FreeOSMemory()
	}
}

// ReleaseStartup implements native.Library.
func (Library) ReleaseStartup() { C.unmap_startup() }
