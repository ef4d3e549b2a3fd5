//! Python's formatting of values: str(), repr() and json.dumps(). Chat templates are
//! written for Python's jinja2, so a prompt depends on these formats.

use crate::guarded::MAX_NESTING;
use crate::limits::{charge, reached};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// Options of json.dumps; the defaults are those of the tojson filter in Hugging
/// Face's chat templates.
pub struct JsonStyle {
    pub ensure_ascii: bool,
    pub sort_keys: bool,
    /// The text of one level of indentation; None writes a single line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
}

/// Returns str.isspace() of c; Rust's White_Space lacks the four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Appends str(value).
pub fn write_str(out: &mut String, value: &Value) {
    match value.as_str() {
        Some(s) => out.push_str(s),
        None if value.is_undefined() => {}
        None => write_repr(out, value, 0),
    }
}

/// Returns str(value).
pub fn to_str(value: &Value) -> String {
    let mut out = String::new();
    write_str(&mut out, value);
    out
}

/// Counts an item that is written at that depth of nesting.
fn count(depth: usize) {
    charge(1);
    if depth > MAX_NESTING {
        reached("nesting");
    }
}

/// Appends repr(value).
fn write_repr(out: &mut String, value: &Value, depth: usize) {
    count(depth);
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, "inf", "nan"),
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Appends json.dumps(value); an error where Python raises TypeError.
pub fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    count(depth);
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value, "Infinity", "NaN"),
        ValueKind::String => write_json_str(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut empty = true;
            out.push('[');
            for item in value.try_iter()? {
                if !empty {
                    out.push_str(&style.item_separator);
                }
                empty = false;
                break_line(out, style, depth + 1);
                write_json(out, &item, style, depth + 1)?;
            }
            if !empty {
                break_line(out, style, depth);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                if i > 0 {
                    out.push_str(&style.item_separator);
                }
                break_line(out, style, depth + 1);
                write_json_key(out, key, style)?;
                out.push_str(&style.key_separator);
                write_json(out, &value.get_item(key)?, style, depth + 1)?;
            }
            if !keys.is_empty() {
                break_line(out, style, depth);
            }
            out.push('}');
        }
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("a value of type {kind} is not JSON serializable"),
            ))
        }
    }
    Ok(())
}

fn break_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_json_key(out: &mut String, key: &Value, style: &JsonStyle) -> Result<(), Error> {
    if let Some(s) = key.as_str() {
        write_json_str(out, s, style.ensure_ascii);
        return Ok(());
    }
    out.push('"');
    match key.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => write_json(out, key, style, 0)?,
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("JSON keys must be strings or numbers, not {kind}"),
            ))
        }
    }
    out.push('"');
    Ok(())
}

fn write_json_str(out: &mut String, s: &str, ensure_ascii: bool) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if c > '~' && ensure_ascii => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn write_number(out: &mut String, value: &Value, infinity: &str, nan: &str) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return;
    }
    let Ok(x) = f64::try_from(value.clone()) else {
        let _ = write!(out, "{value}");
        return;
    };
    if x.is_nan() {
        out.push_str(nan);
    } else if x.is_infinite() {
        if x < 0.0 {
            out.push('-');
        }
        out.push_str(infinity);
    } else {
        write_float(out, x);
    }
}

/// Appends float.__repr__(x) of a finite x: the shortest digits that read back
/// as x, with an exponent below 1e-4 and from 1e16 on.
fn write_float(out: &mut String, x: f64) {
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let fixed = format!("{x}");
        out.push_str(&fixed);
        if !fixed.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.abs());
}

fn write_str_repr(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let code = c as u32;
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Returns str.isprintable() of c, except for code points that Unicode has not
/// assigned yet.
fn is_printable(c: char) -> bool {
    if c == ' ' {
        return true;
    }
    if c.is_control() || c.is_whitespace() {
        return false;
    }
    !matches!(c as u32,
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x890..=0x891 | 0x8e2 | 0x180e
        | 0x200b..=0x200f | 0x202a..=0x202e | 0x2060..=0x206f | 0xe000..=0xf8ff | 0xfeff
        | 0xfff0..=0xfffb | 0xfffe..=0xffff | 0x110bd | 0x110cd | 0x13430..=0x1343f
        | 0x1bca0..=0x1bca3 | 0x1d173..=0x1d17a | 0xe0000..=0xe007f | 0xf0000..=0x10ffff)
}
