//! Token ids of texts by crate fastokens, on threads of its own.
//!
//! fastokens remembers words for each thread: 8 to 16 MB to begin with, up to 100
//! as it sees new words. Go calls from whatever thread it is on, and each would get
//! such a memory and keep it. So a few threads encode, one for each call under way,
//! and a thread ends with its memory when it has idled or has read enough.

use crate::chat::{chat_bytes, slice};
use crate::encode::token_ids;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

/// How long a thread waits for the next call.
const IDLE: Duration = Duration::from_secs(10);
/// Bytes that a thread reads in its life: what it remembers stays below that.
const LIFE: usize = 8 << 20;
/// In place of a number of tokens: the text could not be encoded.
const FAILED: u32 = u32::MAX;

/// An encoder. Threads may share it.
pub struct FastEncoder(Arc<Shared>);

struct Shared {
    tokenizer: fastokens::Tokenizer,
    idle: Mutex<Vec<Idle>>, // the last one idle the shortest time
}

/// A thread that waits for a job; None ends it.
struct Idle {
    thread: u64,
    jobs: SyncSender<Option<Job>>,
}

/// Pieces of a text, and where their tokens go. Who sends it waits for the answer, so
/// that text and pieces live until then.
struct Job {
    text: &'static [u8],
    pieces: &'static [text_piece],
    add_special: bool,
    done: SyncSender<Encoded>,
}

/// A piece of a text, in bytes, and the number of its tokens.
#[repr(C)]
pub struct text_piece {
    start: usize,
    end: usize,
    tokens: u32,
}

/// The ids of pieces, one after the other, and how many each has.
struct Encoded {
    ids: Vec<u32>,
    counts: Vec<u32>,
    whole: bool, // no piece made the encoder panic
}

impl Shared {
    fn encode(&self, job: &Job) -> Encoded {
        let bytes: usize = job.pieces.iter().map(|p| p.end - p.start).sum();
        let mut out = Encoded { ids: Vec::with_capacity(bytes / 3 + 8), counts: Vec::with_capacity(job.pieces.len()), whole: true };
        for piece in job.pieces {
            if !out.whole {
                // What the thread remembers may be half changed.
                out.counts.push(FAILED);
                continue;
            }
            let text = String::from_utf8_lossy(&job.text[piece.start..piece.end]);
            let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_with_special_tokens(&text, job.add_special)));
            out.whole &= encoded.is_ok();
            out.counts.push(match encoded {
                Ok(Ok(ids)) => {
                    out.ids.extend_from_slice(&ids);
                    ids.len() as u32
                }
                _ => FAILED,
            });
        }
        out
    }

    /// Hands a job to the thread that has idled the shortest time, or to a new one.
    fn start(self: &Arc<Shared>, job: Job) -> std::io::Result<()> {
        let idle = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
        if let Some(idle) = idle {
            return idle.jobs.send(Some(job)).map_err(std::io::Error::other);
        }
        let shared = self.clone();
        std::thread::Builder::new().name("encode".to_string()).spawn(move || shared.serve(job)).map(|_| ())
    }

    /// The life of a thread.
    fn serve(&self, first: Job) {
        let (sender, jobs) = sync_channel(1);
        let thread = &sender as *const _ as u64;
        let (mut job, mut read) = (first, 0);
        loop {
            let encoded = self.encode(&job);
            read += job.pieces.iter().map(|p| p.end - p.start).sum::<usize>();
            let last = read >= LIFE || !encoded.whole;
            if !last {
                // Before the answer: who gets it may have the next job at hand.
                self.idle.lock().unwrap_or_else(|e| e.into_inner()).push(Idle { thread, jobs: sender.clone() });
            }
            let _ = job.done.send(encoded);
            if last {
                return;
            }
            let mut next = jobs.recv_timeout(IDLE);
            if matches!(next, Err(RecvTimeoutError::Timeout)) {
                let mut idle = self.idle.lock().unwrap_or_else(|e| e.into_inner());
                let at = idle.iter().position(|i| i.thread == thread);
                if let Some(at) = at {
                    idle.remove(at);
                    return;
                }
                drop(idle);
                next = jobs.recv().map_err(|_| RecvTimeoutError::Disconnected); // it is on its way
            }
            match next {
                Ok(Some(next)) => job = next,
                _ => return,
            }
        }
    }
}

/// fastokens' own pool of threads and its caches of whole texts would take memory that
/// nobody bounds; Go cuts texts and encodes them side by side.
fn settle() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::env::set_var("FASTOKENS_BPE_THREADS", "1");
        std::env::remove_var("FASTOKENS_INPUT_CACHE");
        std::env::remove_var("FASTOKENS_SEGMENT_CACHE");
    });
}

/// Reads the content of a tokenizer.json. fastokens reads a file without a tree of its
/// values in between, which leaves less memory in pieces, so it gets one in memory.
#[cfg(target_os = "linux")]
fn load(json: &[u8]) -> Result<fastokens::Tokenizer, String> {
    use std::os::fd::{AsRawFd, FromRawFd};
    let fd = unsafe { libc::memfd_create(c"tokenizer.json".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(format!("no file in memory: {}", std::io::Error::last_os_error()));
    }
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    std::io::Write::write_all(&mut file, json).map_err(|e| e.to_string())?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    fastokens::Tokenizer::from_file(std::path::Path::new(&path)).map_err(|e| e.to_string())
}

#[cfg(not(target_os = "linux"))]
fn load(json: &[u8]) -> Result<fastokens::Tokenizer, String> {
    let value = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    fastokens::Tokenizer::from_json(value).map_err(|e| e.to_string())
}

/// Makes an encoder of the content of a tokenizer.json; null and the reason in error
/// if fastokens does not know that kind.
///
/// # Safety
/// json must point to len readable bytes, error to a writable chat_bytes.
#[no_mangle]
pub unsafe extern "C" fn fast_encoder_new(json: *const u8, len: usize, error: *mut chat_bytes) -> *mut FastEncoder {
    settle();
    let json = slice(json, len);
    let made = catch_unwind(|| load(json));
    match made.unwrap_or_else(|_| Err("it panicked".to_string())) {
        Ok(tokenizer) => Box::into_raw(Box::new(FastEncoder(Arc::new(Shared { tokenizer, idle: Mutex::default() })))),
        Err(reason) => {
            *error = chat_bytes::new(reason.into_bytes());
            std::ptr::null_mut()
        }
    }
}

/// Encodes pieces of a text in UTF-8, each by itself, and fills in their numbers of
/// tokens: 2^32-1 where the encoder failed. The answer is the ids, one piece after the
/// other.
///
/// # Safety
/// encoder must come from fast_encoder_new and not be freed yet, text point to len
/// readable bytes, pieces to count writable pieces of it.
#[no_mangle]
pub unsafe extern "C" fn fast_encode(
    encoder: *const FastEncoder,
    text: *const u8,
    len: usize,
    pieces: *mut text_piece,
    count: usize,
    add_special: i32,
) -> token_ids {
    let encoded = catch_unwind(|| {
        let (done, answer) = sync_channel(1);
        let pieces = std::slice::from_raw_parts(pieces, count);
        (*encoder).0.start(Job { text: slice(text, len), pieces, add_special: add_special != 0, done }).ok()?;
        answer.recv().ok() // the thread drops its end if it dies
    });
    let encoded = encoded.ok().flatten();
    let pieces = std::slice::from_raw_parts_mut(pieces, count);
    match encoded {
        Some(encoded) => {
            for (piece, n) in pieces.iter_mut().zip(encoded.counts) {
                piece.tokens = n;
            }
            token_ids::new(encoded.ids)
        }
        None => {
            pieces.iter_mut().for_each(|piece| piece.tokens = FAILED);
            token_ids::new(Vec::new())
        }
    }
}

/// Frees an encoder; its threads end by themselves.
///
/// # Safety
/// encoder must come from fast_encoder_new and be freed once, with no encoding under
/// way.
#[no_mangle]
pub unsafe extern "C" fn fast_encoder_free(encoder: *mut FastEncoder) {
    if encoder.is_null() {
        return;
    }
    let encoder = Box::from_raw(encoder);
    for idle in encoder.0.idle.lock().unwrap_or_else(|e| e.into_inner()).drain(..) {
        let _ = idle.jobs.send(None);
    }
}
