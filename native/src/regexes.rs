//! A check of the regular expressions in a tokenizer. The engines that run them backtrack,
//! so an expression may take time exponential in the length of the text. The check refuses
//! expressions that may take more steps than the square of the length.

use crate::chat::{chat_bytes, slice};
use fancy_regex::Expr;
use std::panic::catch_unwind;

/// Maximum length of an expression, bytes.
const MAX_LENGTH: usize = 8 << 10;
/// Maximum number of characters of a repetition that counts as bounded.
const MAX_BOUNDED: usize = 64;
/// Maximum number of ways to match consecutive bounded repetitions and alternatives.
const MAX_WAYS: usize = 4096;

/// Expressions of known models that visit each character only a few times, although the
/// check cannot derive it: where one repetition fails, another one matches the same
/// characters.
const LINEAR: [&str; 9] = [
    // GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // GPT-4, Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2, 2.5 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-4o, gpt-oss, Llama 4
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral (Tekken)
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
    // Kimi K2
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// The cost of an expression and of what follows it.
#[derive(Clone, Copy)]
struct Cost {
    /// Unbounded repetitions after which the match may still fail.
    retried: usize,
    /// All unbounded repetitions.
    unbounded: usize,
    /// Ways to match the rest.
    ways: usize,
    /// The rest may fail to match.
    fails: bool,
}

impl Cost {
    fn either(self, other: Cost) -> Cost {
        Cost {
            retried: self.retried.max(other.retried),
            unbounded: self.unbounded.max(other.unbounded),
            ways: self.ways.saturating_add(other.ways),
            fails: self.fails && other.fails,
        }
    }
}

/// Whether the expression matches one character, in one way.
fn is_one_char(e: &Expr) -> bool {
    match e {
        Expr::Any { .. } => true,
        Expr::Delegate { size, .. } => *size == 1,
        Expr::Literal { val, .. } => val.chars().count() == 1,
        Expr::Group(inner) | Expr::AtomicGroup(inner) => is_one_char(inner),
        _ => false,
    }
}

/// The number of characters that the expression matches, if number and way are fixed.
fn fixed_length(e: &Expr) -> Option<usize> {
    match e {
        Expr::Literal { val, .. } => Some(val.chars().count()),
        Expr::Concat(list) => list.iter().map(fixed_length).sum(),
        Expr::Group(inner) | Expr::AtomicGroup(inner) => fixed_length(inner),
        one if is_one_char(one) => Some(1),
        _ => None,
    }
}

fn cost(e: &Expr, after: Cost) -> Result<Cost, &'static str> {
    Ok(match e {
        Expr::Empty => after,
        Expr::Any { .. } | Expr::Literal { .. } | Expr::Delegate { .. } => Cost { fails: true, ..after },
        Expr::Assertion(_) => Cost { fails: true, ..after },
        Expr::Concat(list) => list.iter().rev().try_fold(after, |after, e| cost(e, after))?,
        Expr::Alt(list) => {
            let mut all: Option<Cost> = None;
            for branch in list {
                let one = cost(branch, after)?;
                all = Some(all.map_or(one, |all| all.either(one)));
            }
            all.unwrap_or(after)
        }
        Expr::Group(inner) | Expr::AtomicGroup(inner) => cost(inner, after)?,
        Expr::LookAround(inner, _) => {
            let alone = cost(inner, Cost { retried: 0, unbounded: 0, ways: 1, fails: false })?;
            if alone.unbounded > 0 {
                return Err("an unbounded repetition in a look-around");
            }
            Cost { fails: true, ways: after.ways.saturating_mul(alone.ways), ..after }
        }
        Expr::Repeat { child, lo, hi, .. } => {
            let fails = after.fails || *lo > 0;
            match fixed_length(child) {
                Some(0) => return Err("a repetition of nothing"),
                Some(n) if lo.saturating_mul(n) > MAX_BOUNDED => return Err("a long repetition"),
                Some(n) if hi.saturating_mul(n) <= MAX_BOUNDED => {
                    Cost { ways: after.ways.saturating_mul(hi - lo + 1), fails, ..after }
                }
                Some(_) => Cost {
                    retried: after.retried + after.fails as usize,
                    unbounded: after.unbounded + 1,
                    fails,
                    ..after
                },
                None if *hi <= 1 => {
                    let inner = cost(child, after)?;
                    if *lo == 0 { inner.either(after) } else { inner }
                }
                None => return Err("a repetition of what can match in several ways"),
            }
        }
        _ => return Err("a construct other than characters, groups, choices and repetitions"),
    })
}

/// Returns whether the steps grow with the length of the text (true) or with its square
/// (false); an error if faster.
fn check(expression: &str) -> Result<bool, String> {
    let escaped = expression.replace('\r', "\\r").replace('\n', "\\n");
    if LINEAR.contains(&escaped.as_str()) {
        return Ok(true);
    }
    if expression.len() > MAX_LENGTH {
        return Err(format!("it has {} bytes; the maximum is {MAX_LENGTH}", expression.len()));
    }
    let tree = Expr::parse_tree(expression).map_err(|e| format!("it cannot be checked: {e}"))?;
    let cost = cost(&tree.expr, Cost { retried: 0, unbounded: 0, ways: 1, fails: false }).map_err(|what| format!("it has {what}"))?;
    if cost.retried > 1 {
        return Err("it has several unbounded repetitions that may be tried in all combinations".to_string());
    }
    if cost.ways > MAX_WAYS {
        return Err(format!("it can match in more than {MAX_WAYS} ways"));
    }
    Ok(cost.retried == 0)
}

/// Checks a regular expression in UTF-8. Returns 1 if its steps grow with the length of the
/// text, 2 if with the square of the length, or 0 with the reason of the refusal in out.
///
/// # Safety
/// expression must point to len readable bytes, out to a writable chat_bytes.
#[no_mangle]
pub unsafe extern "C" fn regex_check(expression: *const u8, len: usize, out: *mut chat_bytes) -> i32 {
    let text = String::from_utf8_lossy(slice(expression, len));
    match catch_unwind(|| check(&text)).unwrap_or_else(|_| Err("it cannot be checked".to_string())) {
        Ok(true) => 1,
        Ok(false) => 2,
        Err(reason) => {
            *out = chat_bytes::new(reason.into_bytes());
            0
        }
    }
}
