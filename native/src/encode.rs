//! Token ids of texts by crate tokenizers, without the strings, offsets and masks of a
//! full encoding, which cost far more than the ids.

use crate::chat::{handed_over, slice};
use crate::UnifiedTokenizer;
use std::panic::{catch_unwind, AssertUnwindSafe};
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer, Result};

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

fn encode(tokenizer: &UnifiedTokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let tokenizer = match tokenizer {
        UnifiedTokenizer::HuggingFace(tokenizer) => tokenizer,
        other => return other.encode(text, add_special).map_err(|e| e.to_string().into()),
    };
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

/// Encodes a text in UTF-8. Returns 1 with the ids in out, or 0 if the tokenizer
/// failed.
///
/// # Safety
/// tokenizer must be one of this library and not be freed yet, text point to len
/// readable bytes, out to a writable token_ids.
#[no_mangle]
pub unsafe extern "C" fn text_encode(
    tokenizer: *const UnifiedTokenizer,
    text: *const u8,
    len: usize,
    add_special: i32,
    out: *mut token_ids,
) -> i32 {
    let bytes = slice(text, len);
    let encoded = catch_unwind(AssertUnwindSafe(|| encode(&*tokenizer, &String::from_utf8_lossy(bytes), add_special != 0)));
    let Ok(Ok(ids)) = encoded else {
        return 0;
    };
    *out = token_ids::new(ids);
    1
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
