//! Limits on the memory and the work of one call, because templates and tokenizers are
//! untrusted files of the model's publisher. A thread counts its allocations between the
//! beginning and the end of `within`. An allocation beyond the limits fails, and the hook
//! for failed allocations unwinds to `within` where the standard library would abort.
//! Without feature alloc_error_hook it aborts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

/// Whether a call fails that takes too much memory; otherwise the process ends.
pub const REFUSES: bool = cfg!(feature = "alloc_error_hook");

/// The limits of one call.
pub struct Limits {
    /// Bytes allocated at the same time.
    pub memory: usize,
    /// Bytes allocated in total, including freed ones: the cost of copying.
    pub turnover: usize,
    /// Units passed to `charge`: about 10 ns each.
    pub work: usize,
}

/// Why a call ended early.
pub enum Failure {
    /// It reached the limit of that name.
    Limit(&'static str),
    Panic,
}

/// The payload of an unwinding call.
struct Reached(&'static str);

/// Stands for no limit; out of reach for counting.
const OFF: isize = isize::MAX;
/// Cost of an allocation in addition to its bytes.
const PER_ALLOCATION: isize = 32;

// They have no destructors, so that the allocator can use them at any time.
thread_local! {
    static MEMORY: Cell<isize> = const { Cell::new(OFF) };
    static TURNOVER: Cell<isize> = const { Cell::new(0) };
    static WORK: Cell<isize> = const { Cell::new(OFF) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts an allocation; false if it exceeds a limit.
#[inline]
fn take(bytes: usize) -> bool {
    let left = MEMORY.get();
    left == OFF || take_limited(left, bytes as isize)
}

fn take_limited(left: isize, bytes: isize) -> bool {
    let turnover = TURNOVER.get().saturating_sub(bytes).saturating_sub(PER_ALLOCATION);
    if bytes > left || turnover < 0 {
        return false;
    }
    MEMORY.set(left - bytes);
    TURNOVER.set(turnover);
    true
}

#[inline]
fn give(bytes: usize) {
    let left = MEMORY.get();
    if left != OFF {
        MEMORY.set(left + bytes as isize);
    }
}

// SAFETY: all memory is the system allocator's; a refused request returns null, as the
// trait permits, and changes nothing.
unsafe impl GlobalAlloc for Counting {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if take(layout.size()) {
            System.alloc(layout)
        } else {
            std::ptr::null_mut()
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if take(layout.size()) {
            System.alloc_zeroed(layout)
        } else {
            std::ptr::null_mut()
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        give(layout.size());
        System.dealloc(block, layout)
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist for a moment.
        if !take(size) {
            return std::ptr::null_mut();
        }
        let moved = System.realloc(block, layout, size);
        give(if moved.is_null() { size } else { layout.size() });
        moved
    }
}

/// Ends a limited call whose allocation failed. It returns outside of such a call, or if
/// the system has no memory: then the process aborts.
#[cfg(feature = "alloc_error_hook")]
fn out_of_memory(layout: Layout) {
    let left = MEMORY.get();
    if left != OFF && !take_limited(left, layout.size() as isize) {
        reached("memory");
    }
    eprintln!("memory allocation of {} bytes failed", layout.size());
}

pub fn reached(limit: &'static str) -> ! {
    MEMORY.set(OFF); // unwinding allocates, and frees more
    WORK.set(OFF);
    resume_unwind(Box::new(Reached(limit)))
}

/// Counts work without allocations; beyond the limit, the call ends.
#[inline]
pub fn charge(units: usize) {
    let left = WORK.get();
    if left == OFF {
        return;
    }
    let left = left.saturating_sub(units as isize);
    WORK.set(left.max(0));
    if left <= 0 {
        reached("work");
    }
}

/// Runs a call within limits. Memory that it returns stays allocated. Calls do not nest.
pub fn within<T>(limits: Limits, call: impl FnOnce() -> T) -> Result<T, Failure> {
    #[cfg(feature = "alloc_error_hook")]
    {
        static HOOK: std::sync::Once = std::sync::Once::new();
        HOOK.call_once(|| std::alloc::set_alloc_error_hook(out_of_memory));
    }
    let bounded = |n: usize| n.min(isize::MAX as usize / 4) as isize;
    TURNOVER.set(bounded(limits.turnover));
    WORK.set(bounded(limits.work));
    MEMORY.set(bounded(limits.memory));
    let result = catch_unwind(AssertUnwindSafe(call));
    MEMORY.set(OFF);
    WORK.set(OFF);
    result.map_err(|payload| match payload.downcast_ref::<Reached>() {
        Some(Reached(limit)) => Failure::Limit(limit),
        None => Failure::Panic,
    })
}
