//! Token ids of a text and nothing else: a full encoding also makes every token's
//! string, offsets and masks, which cost far more than the ids.
//!
//! A byte-level BPE cuts a text into words with regular expressions and turns each
//! word into tokens by itself, so the ids of words are remembered.

use crate::UnifiedTokenizer;
use std::collections::HashMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::RwLock;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    Model, ModelWrapper, OffsetReferential, OffsetType, PreTokenizer, PreTokenizerWrapper, Result, SplitDelimiterBehavior,
    Tokenizer,
};

/// Words remembered, and the longest of them in bytes.
const MAX_WORDS: usize = 1 << 15;
const MAX_WORD: usize = 64;

/// The words that GPT-2's byte-level pre-tokenizer makes.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Encodes with a tokenizer that lives longer. Threads may share it.
pub struct TextEncoder {
    tokenizer: *const UnifiedTokenizer,
    words: Option<Words>, // None: any other kind than byte-level BPE
}

/// The way of a byte-level BPE.
struct Words {
    splits: Vec<SysRegex>, // one after the other, each on the pieces of the one before
    chars: [char; 256],    // what each byte is called in the vocabulary
    known: RwLock<Known>,
}

/// The ids of words, one after the other, and where each word's are.
#[derive(Default)]
struct Known {
    places: HashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
}

/// Token ids that the library owns; token_ids_free takes them back.
#[repr(C)]
pub struct token_ids {
    data: *mut u32,
    len: usize,
}

impl TextEncoder {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        // The tokenizer is alive: that is what text_encoder_new asks for.
        let tokenizer = match unsafe { &*self.tokenizer } {
            UnifiedTokenizer::HuggingFace(tokenizer) => tokenizer,
            other => return other.encode(text, add_special).map_err(|e| e.to_string().into()),
        };
        if add_special {
            return Ok(tokenizer.encode_fast(text, true)?.get_ids().to_vec());
        }
        let mut pieces = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        if let Some(words) = &self.words {
            let pieces = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
            return words.encode(tokenizer.get_model(), &pieces.iter().map(|(text, _, tokens)| (*text, tokens.as_deref())).collect::<Vec<_>>());
        }
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
}

impl Words {
    /// Reads the way of a tokenizer; None if it is not a byte-level BPE whose words
    /// this file knows how to cut.
    fn of(tokenizer: &Tokenizer) -> Option<Words> {
        match tokenizer.get_model() {
            ModelWrapper::BPE(bpe) if bpe.dropout.is_none() => {}
            _ => return None,
        }
        let pre_tokenizer = tokenizer.get_pre_tokenizer()?;
        let (last, before) = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref().split_last()?,
            single => (single, [].as_slice()),
        };
        let mut splits = Vec::new();
        for stage in before {
            match stage {
                PreTokenizerWrapper::Split(split) if !split.invert && split.behavior == SplitDelimiterBehavior::Isolated => {
                    match &split.pattern {
                        SplitPattern::Regex(pattern) => splits.push(SysRegex::new(pattern).ok()?),
                        SplitPattern::String(_) => return None,
                    }
                }
                _ => return None,
            }
        }
        match last {
            PreTokenizerWrapper::ByteLevel(level) if !level.add_prefix_space => {
                if level.use_regex {
                    splits.push(SysRegex::new(GPT2).ok()?);
                }
            }
            _ => return None,
        }
        Some(Words { splits, chars: byte_chars(), known: RwLock::default() })
    }

    /// Returns the ids of pieces that have none yet, and of the others theirs.
    fn encode(&self, model: &ModelWrapper, pieces: &[(&str, Option<&[tokenizers::Token]>)]) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(pieces.iter().map(|(text, _)| text.len()).sum::<usize>() / 3 + 8);
        let mut learned: Vec<(&str, (usize, usize))> = Vec::new();
        {
            let known = self.known.read().map_err(|_| "a lock was poisoned")?;
            for (text, tokens) in pieces {
                if let Some(tokens) = tokens {
                    ids.extend(tokens.iter().map(|token| token.id));
                    continue;
                }
                cut(&self.splits, text, &mut |word| {
                    if let Some((start, end)) = known.places.get(word) {
                        ids.extend_from_slice(&known.ids[*start as usize..*end as usize]);
                        return Ok(());
                    }
                    let named: String = word.bytes().map(|b| self.chars[b as usize]).collect();
                    let start = ids.len();
                    ids.extend(model.tokenize(&named)?.iter().map(|token| token.id));
                    if word.len() <= MAX_WORD {
                        learned.push((word, (start, ids.len())));
                    }
                    Ok(())
                })?;
            }
        }
        if learned.is_empty() {
            return Ok(ids);
        }
        // Another thread may be learning: what is not remembered now will be later.
        if let Ok(mut known) = self.known.try_write() {
            for (word, (start, end)) in learned {
                if known.places.len() >= MAX_WORDS {
                    *known = Known::default();
                }
                if !known.places.contains_key(word) {
                    let place = known.ids.len() as u32;
                    known.ids.extend_from_slice(&ids[start..end]);
                    let place = (place, known.ids.len() as u32);
                    known.places.insert(word.into(), place);
                }
            }
        }
        Ok(ids)
    }
}

/// Cuts text with the first expression and what comes out with the others: a
/// match is a piece, and so is what lies between two.
fn cut<'t>(splits: &[SysRegex], text: &'t str, word: &mut dyn FnMut(&'t str) -> Result<()>) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((first, others)) = splits.split_first() else {
        return word(text);
    };
    let mut done = 0;
    for (start, end) in first.find_iter(text) {
        cut(others, &text[done..start], word)?;
        cut(others, &text[start..end], word)?;
        done = end;
    }
    cut(others, &text[done..], word)
}

/// GPT-2's printable names of the 256 bytes: those that are printable Latin-1
/// name themselves, the others follow from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut next = 256;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte as u8 as char,
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}

/// Makes an encoder over a tokenizer of this library; null if there is none.
///
/// # Safety
/// tokenizer must be one of this library and be freed after the encoder.
#[no_mangle]
pub unsafe extern "C" fn text_encoder_new(tokenizer: *const UnifiedTokenizer) -> *mut TextEncoder {
    let made = catch_unwind(AssertUnwindSafe(|| {
        let words = match &*tokenizer {
            UnifiedTokenizer::HuggingFace(tokenizer) => Words::of(tokenizer),
            _ => None,
        };
        Box::into_raw(Box::new(TextEncoder { tokenizer, words }))
    }));
    made.unwrap_or(std::ptr::null_mut())
}

/// Encodes a text in UTF-8. The answer is 1 and out the ids, or 0 if the
/// tokenizer failed.
///
/// # Safety
/// encoder must come from text_encoder_new and not be freed yet, text point to len
/// readable bytes, out to a writable token_ids.
#[no_mangle]
pub unsafe extern "C" fn text_encode(
    encoder: *const TextEncoder,
    text: *const u8,
    len: usize,
    add_special: i32,
    out: *mut token_ids,
) -> i32 {
    let bytes = crate::chat::slice(text, len);
    let encoded = catch_unwind(AssertUnwindSafe(|| {
        let text = String::from_utf8_lossy(bytes);
        (*encoder).encode(&text, add_special != 0)
    }));
    let Ok(Ok(ids)) = encoded else {
        return 0;
    };
    let boxed = ids.into_boxed_slice();
    let len = boxed.len();
    *out = token_ids { data: Box::into_raw(boxed).cast(), len };
    1
}

/// Frees what text_encode filled in.
///
/// # Safety
/// ids must come from text_encode and be freed once.
#[no_mangle]
pub unsafe extern "C" fn token_ids_free(ids: token_ids) {
    if !ids.data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(ids.data, ids.len)));
    }
}

/// Frees an encoder.
///
/// # Safety
/// encoder must come from text_encoder_new and be freed once, with no encoding
/// under way.
#[no_mangle]
pub unsafe extern "C" fn text_encoder_free(encoder: *mut TextEncoder) {
    if !encoder.is_null() {
        drop(Box::from_raw(encoder));
    }
}
