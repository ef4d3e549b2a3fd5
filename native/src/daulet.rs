//! The C functions that the Go module github.com/daulet/tokenizers v1.24.0 links against,
//! as its tokenizers.h declares them, within the limits of this library. Decoding, reading
//! and counting are complete. The others, which the router does not call, fail.

use crate::chat::slice;
use crate::encode::{describe, limits, limits_of_file};
use crate::limits::within;
use std::ffi::{c_char, CString};
use std::ptr::null_mut;
use std::sync::Once;
use tokenizers::Tokenizer;

/// The first byte of a result that is an error message instead of decoded tokens. It occurs
/// in no UTF-8 text. internal/prompt/encode has the same values of FAILED and ZERO.
const FAILED: u8 = 0xff;
/// Stands for a zero byte, which would end the text. It occurs in no UTF-8 text either.
const ZERO: [u8; 2] = [0xc0, 0x80];

/// Maximum backtracking steps of one search by a regular expression, about a second.
const MAX_RETRIES: libc::c_ulong = 50_000_000;

extern "C" {
    /// Of the library that runs the regular expressions of crate tokenizers; its own
    /// default has no limit.
    fn onig_set_retry_limit_in_search(n: libc::c_ulong) -> libc::c_int;
}

#[repr(C)]
pub struct tokenizers_options {
    encode_special_tokens: bool,
}

#[repr(C)]
pub struct tokenizers_encode_options {
    add_special_token: bool,
    return_type_ids: bool,
    return_tokens: bool,
    return_special_tokens_mask: bool,
    return_attention_mask: bool,
    return_offsets: bool,
}

#[repr(C)]
pub struct tokenizers_buffer {
    ids: *mut u32,
    type_ids: *mut u32,
    special_tokens_mask: *mut u32,
    attention_mask: *mut u32,
    tokens: *mut c_char,
    offsets: *mut usize,
    len: u32,
}

/// Returns a text that tokenizers_free_string frees.
fn c_string(text: Vec<u8>) -> *mut c_char {
    let zeros_replaced = |text: Vec<u8>| {
        let parts: Vec<&[u8]> = text.split(|b| *b == 0).collect();
        CString::new(parts.join(&ZERO[..])).unwrap_or_default()
    };
    CString::new(text).unwrap_or_else(|e| zeros_replaced(e.into_vec())).into_raw()
}

fn failed(reason: &str) -> *mut c_char {
    c_string([&[FAILED], reason.as_bytes()].concat())
}

/// Sets the error of a function that makes a tokenizer, which returns null then.
unsafe fn refuse(error: *mut *mut c_char, reason: &str) -> *mut Tokenizer {
    if !error.is_null() {
        *error = c_string(reason.replace('\0', "\\0").into_bytes());
    }
    null_mut()
}

/// Fails to link where the Go module is of a version with other C functions.
#[no_mangle]
pub extern "C" fn tokenizers_version_1_23_0() {}

#[no_mangle]
pub extern "C" fn tokenizers_version() -> *const c_char {
    c"1.23.0".as_ptr()
}

/// Reads the content of a tokenizer.json; null and the reason in error if that fails.
///
/// # Safety
/// json must point to len readable bytes, options to one, error to a writable pointer.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_from_bytes(
    json: *const u8,
    len: u32,
    options: *const tokenizers_options,
    error: *mut *mut c_char,
) -> *mut Tokenizer {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        onig_set_retry_limit_in_search(MAX_RETRIES);
    });
    let json = slice(json, len as usize);
    let special = !options.is_null() && (*options).encode_special_tokens;
    let read = within(limits_of_file(json.len()), || {
        let read = |mut tokenizer: Tokenizer| {
            tokenizer.set_encode_special_tokens(special);
            Box::into_raw(Box::new(tokenizer))
        };
        Tokenizer::from_bytes(json).map(read).map_err(|e| e.to_string())
    });
    read.unwrap_or_else(|failure| Err(describe(failure))).unwrap_or_else(|reason| refuse(error, &reason))
}

/// Decodes tokens. The result is never null: it is the text, with ZERO for each zero byte,
/// or FAILED and the reason why there is none.
///
/// # Safety
/// tokenizer must come from tokenizers_from_bytes and not be freed yet, ids point to len
/// readable numbers.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_decode(
    tokenizer: *const Tokenizer,
    ids: *const u32,
    len: u32,
    skip_special_tokens: bool,
) -> *mut c_char {
    if tokenizer.is_null() {
        return failed("the tokenizer is closed");
    }
    let ids = if len == 0 { &[] } else { std::slice::from_raw_parts(ids, len as usize) };
    let decoded = within(limits(16 * ids.len()), || {
        let text = (*tokenizer).decode(ids, skip_special_tokens);
        text.map(|text| c_string(text.into_bytes())).map_err(|e| e.to_string())
    });
    decoded.unwrap_or_else(|failure| Err(describe(failure))).unwrap_or_else(|reason| failed(&reason))
}

/// Counts the tokens of a tokenizer, added ones included; 0 if that fails.
///
/// # Safety
/// tokenizer must come from tokenizers_from_bytes and not be freed yet.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_vocab_size(tokenizer: *const Tokenizer) -> u32 {
    if tokenizer.is_null() {
        return 0;
    }
    within(limits(0), || (*tokenizer).get_vocab_size(true) as u32).unwrap_or(0)
}

/// Frees a tokenizer.
///
/// # Safety
/// tokenizer must come from tokenizers_from_bytes and be freed once, with no call under way.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_free_tokenizer(tokenizer: *mut Tokenizer) {
    if !tokenizer.is_null() {
        drop(Box::from_raw(tokenizer));
    }
}

/// Frees a text.
///
/// # Safety
/// text must come from a function of this file and be freed once.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_free_string(text: *mut c_char) {
    if !text.is_null() {
        drop(CString::from_raw(text));
    }
}

/// Fails.
///
/// # Safety
/// error must be null or point to a writable pointer.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_from_bytes_with_truncation(
    _json: *const u8,
    _len: u32,
    _max_len: u32,
    _direction: u8,
    error: *mut *mut c_char,
) -> *mut Tokenizer {
    refuse(error, "kvrouter's native library does not truncate: use FromBytes")
}

/// Fails.
///
/// # Safety
/// error must be null or point to a writable pointer.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_from_file(_path: *const c_char, error: *mut *mut c_char) -> *mut Tokenizer {
    refuse(error, "kvrouter's native library opens no files: use FromBytes")
}

/// Fails.
///
/// # Safety
/// error must be null or point to a writable pointer.
#[no_mangle]
pub unsafe extern "C" fn tokenizers_from_tiktoken(
    _model: *const c_char,
    _config: *const c_char,
    _pattern: *const c_char,
    error: *mut *mut c_char,
) -> *mut Tokenizer {
    refuse(error, "kvrouter's native library does not support tiktoken: use FromBytes with a tokenizer.json")
}

/// Returns no tokens: text_encode returns them without copies of the text, and says
/// whether it failed.
#[no_mangle]
pub extern "C" fn tokenizers_encode(
    _tokenizer: *mut Tokenizer,
    _text: *const c_char,
    _options: *const tokenizers_encode_options,
) -> tokenizers_buffer {
    tokenizers_buffer {
        ids: null_mut(),
        type_ids: null_mut(),
        special_tokens_mask: null_mut(),
        attention_mask: null_mut(),
        tokens: null_mut(),
        offsets: null_mut(),
        len: 0,
    }
}

/// Does nothing: the buffers of tokenizers_encode are empty.
#[no_mangle]
pub extern "C" fn tokenizers_free_buffer(_buffer: tokenizers_buffer) {}
