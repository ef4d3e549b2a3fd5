//! Token ids of texts by crate fastokens, on threads of its own.
//!
//! fastokens has a word cache per thread, of 8 to 16 MB at first and up to 100 MB with
//! new words. Go calls from any of its threads, and each would get a cache and keep it.
//! So a few dedicated threads encode, one for each concurrent call. A thread ends, and
//! frees its cache, after an idle time or after a number of bytes.

use crate::chat::{chat_bytes, slice};
use crate::encode::{describe, limits, limits_of_file, token_ids};
use crate::limits::within;
use std::panic::catch_unwind;
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

/// Maximum idle time of a thread.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum bytes that a thread encodes, which bounds its cache.
const LIFE: usize = 8 << 20;
/// Bytes that the cache of a thread may take at once, when it grows.
const CACHE: usize = 192 << 20;
/// Instead of a number of tokens: the text could not be encoded.
const FAILED: u32 = u32::MAX;

/// An encoder. Threads may share it.
pub struct FastEncoder(Arc<Shared>);

struct Shared {
    tokenizer: fastokens::Tokenizer,
    idle: Mutex<Vec<Idle>>, // the last one idle the shortest time
}

/// An idle thread; None ends it.
struct Idle {
    thread: u64,
    jobs: SyncSender<Option<Job>>,
}

/// Pieces of a text, and the channel for their tokens. The sender waits for the answer,
/// so that text and pieces live until then.
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

/// The concatenated ids of pieces, and the number of ids of each.
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
                // The thread's cache may be inconsistent.
                out.counts.push(FAILED);
                continue;
            }
            let text = String::from_utf8_lossy(&job.text[piece.start..piece.end]);
            let mut limits = limits(text.len());
            limits.memory += CACHE;
            let encoded = within(limits, || self.tokenizer.encode_with_special_tokens(&text, job.add_special));
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

    /// Passes a job to the thread with the shortest idle time, or to a new one.
    fn start(self: &Arc<Shared>, job: Job) -> std::io::Result<()> {
        let idle = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
        if let Some(idle) = idle {
            return idle.jobs.send(Some(job)).map_err(std::io::Error::other);
        }
        let shared = self.clone();
        std::thread::Builder::new().name("encode".to_string()).spawn(move || shared.serve(job)).map(|_| ())
    }

    /// The main loop of a thread.
    fn serve(&self, first: Job) {
        let (sender, jobs) = sync_channel(1);
        let thread = &sender as *const _ as u64;
        let (mut job, mut read) = (first, 0);
        loop {
            let encoded = self.encode(&job);
            read += job.pieces.iter().map(|p| p.end - p.start).sum::<usize>();
            let last = read >= LIFE || !encoded.whole;
            if !last {
                // Before the answer, because its receiver may send the next job at once.
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

/// Disables fastokens' own thread pool and its caches of whole texts, whose memory is
/// not bounded; Go splits texts and encodes the parts concurrently.
fn settle() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::env::set_var("FASTOKENS_BPE_THREADS", "1");
        std::env::remove_var("FASTOKENS_INPUT_CACHE");
        std::env::remove_var("FASTOKENS_SEGMENT_CACHE");
    });
}

/// Reads the content of a tokenizer.json. fastokens parses a file without an intermediate
/// tree of values, which fragments memory less, so it gets an in-memory file.
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

/// Creates an encoder from the content of a tokenizer.json; null and the reason in error
/// if fastokens does not support it.
///
/// # Safety
/// json must point to len readable bytes, error to a writable chat_bytes.
#[no_mangle]
pub unsafe extern "C" fn fast_encoder_new(json: *const u8, len: usize, error: *mut chat_bytes) -> *mut FastEncoder {
    settle();
    let json = slice(json, len);
    let made = within(limits_of_file(len), || load(json));
    match made.unwrap_or_else(|failure| Err(describe(failure))) {
        Ok(tokenizer) => Box::into_raw(Box::new(FastEncoder(Arc::new(Shared { tokenizer, idle: Mutex::default() })))),
        Err(reason) => {
            *error = chat_bytes::new(reason.into_bytes());
            std::ptr::null_mut()
        }
    }
}

/// Encodes the pieces of a text in UTF-8 independently and sets their numbers of tokens:
/// 2^32-1 if the encoder failed. Returns the concatenated ids of all pieces.
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

/// Frees an encoder; its threads end on their own.
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
