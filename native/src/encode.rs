//! Token ids of texts by crate tokenizers, without the strings, offsets and masks of a
//! full encoding, which cost far more than the ids.

use crate::chat::{handed_over, slice};
use crate::limits::{within, Failure, Limits};
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer, Result, Tokenizer};

/// Token ids allocated by the library, to be freed with token_ids_free.
#[repr(C)]
pub struct token_ids {
    data: *mut u32,
    len: usize,
}

impl token_ids {
    pub(crate) fn new(ids: Vec<u32>) -> token_ids {
        let (data, len) = handed_over(ids);
        token_ids { data, len }
    }
}

/// Limits of a tokenizer for a text of that many bytes. Crate tokenizers takes about 60
/// bytes of memory for each.
pub(crate) fn limits(text: usize) -> Limits {
    Limits { memory: (64 << 20) + 512 * text, turnover: (1 << 30) + (16 << 10) * text, work: 0 }
}

/// Limits for reading a tokenizer of that many bytes.
pub(crate) fn limits_of_file(json: usize) -> Limits {
    Limits { memory: (64 << 20) + 64 * json, turnover: (1 << 30) + 1024 * json, work: 0 }
}

pub(crate) fn describe(failure: Failure) -> String {
    match failure {
        Failure::Limit(limit) => format!("it exceeds the limit of {limit}"),
        Failure::Panic => "it panicked".to_string(),
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    if add_special {
        return Ok(tokenizer.encode_fast(text, true)?.get_ids().to_vec());
    }
    let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    pieces.tokenize(|piece| tokenizer.get_model().tokenize(piece.get()))?;
    let mut ids = Vec::with_capacity(text.len() / 3);
    for (_, _, tokens) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
        ids.extend(tokens.iter().flatten().map(|token| token.id));
    }
    Ok(ids)
}

/// Encodes a text in UTF-8. Returns 1 with the ids in out, 0 if the tokenizer failed, or 2
/// if it reached a limit.
///
/// # Safety
/// tokenizer must be one of this library and not be freed yet, text point to len
/// readable bytes, out to a writable token_ids.
#[no_mangle]
pub unsafe extern "C" fn text_encode(
    tokenizer: *const Tokenizer,
    text: *const u8,
    len: usize,
    add_special: i32,
    out: *mut token_ids,
) -> i32 {
    let bytes = slice(text, len);
    let encoded = within(limits(len), || encode(&*tokenizer, &String::from_utf8_lossy(bytes), add_special != 0));
    match encoded {
        Ok(Ok(ids)) => {
            *out = token_ids::new(ids);
            1
        }
        Err(Failure::Limit(_)) => 2,
        _ => 0,
    }
}

/// Frees ids that an encoder returned.
///
/// # Safety
/// ids must come from this library and be freed once.
#[no_mangle]
pub unsafe extern "C" fn token_ids_free(ids: token_ids) {
    if !ids.data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(ids.data, ids.len)));
    }
}
