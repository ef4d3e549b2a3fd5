//! Large stacks for functions that recurse for each level of a nested value or expression.
//! Their address space is reserved, and kept for the next call: mapping a stack takes
//! longer than rendering a short chat.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::Mutex;

/// Bytes of a stack.
const SIZE: usize = 256 << 20;
/// Size of the guard pages at the lowest addresses: an overflow is a fault, instead of a
/// write to other memory.
const GUARD: usize = 64 << 10;
/// Maximum bytes of a kept stack in memory.
const TOUCHED: usize = 1 << 20;
/// At most the size of a page; divides the numbers above.
const PAGE: usize = 4 << 10;
/// Maximum number of kept stacks: all have been in use at the same time.
const KEPT: usize = 32;

/// The lowest address of a stack.
struct Stack(*mut u8);

// SAFETY: it is memory of the process, and one call at a time uses it.
unsafe impl Send for Stack {}

static FREE: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

impl Stack {
    fn take() -> Option<Stack> {
        if let Some(stack) = FREE.lock().unwrap_or_else(|e| e.into_inner()).pop() {
            return Some(stack);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: the system chooses an unused address.
        unsafe {
            let base = libc::mmap(null_mut(), SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            if base == libc::MAP_FAILED {
                return None;
            }
            libc::mprotect(base, GUARD, libc::PROT_NONE);
            Some(Stack(base.cast()))
        }
    }

    /// Whether more than TOUCHED bytes have been used: a stack is written page by page,
    /// from the top. Reading an untouched page takes no memory.
    fn is_large(&self) -> bool {
        // SAFETY: the page is one of the stack, and nothing uses it.
        let page = unsafe { std::slice::from_raw_parts(self.0.add(SIZE - TOUCHED - PAGE).cast::<u64>(), PAGE / 8) };
        page.iter().any(|word| *word != 0)
    }

    fn give_back(self) {
        // SAFETY: nothing uses the stack.
        unsafe {
            if self.is_large() {
                libc::madvise(self.0.add(GUARD).cast(), SIZE - TOUCHED - GUARD, libc::MADV_DONTNEED);
            }
            let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
            if free.len() < KEPT {
                free.push(self);
                return;
            }
            drop(free);
            libc::munmap(self.0.cast(), SIZE);
        }
    }
}

/// Runs a call on a large stack; None: it panicked, or there is no memory for a stack.
pub fn on_large<T>(call: impl FnOnce() -> T) -> Option<T> {
    let stack = Stack::take()?;
    // SAFETY: the stack is aligned to pages, and the callback does not unwind.
    let result = unsafe { psm::on_stack(stack.0, SIZE, || catch_unwind(AssertUnwindSafe(call)).ok()) };
    stack.give_back();
    result
}
