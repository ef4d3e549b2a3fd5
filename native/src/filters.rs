//! Filters, tests and methods where jinja2 (with Hugging Face's settings) and
//! minijinja differ.

use crate::guarded::{check_key, length as items_of, weigh};
use crate::limits::charge;
use crate::python::{is_space, to_str, write_json, JsonStyle};
use minijinja::value::{from_args, Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Adds the filters, tests and methods of this file to env.
pub fn install(env: &mut Environment) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", string);
    env.add_filter("trim", trim);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("join", join);
    env.add_filter("upper", |v: &Value| to_str(v).to_uppercase());
    env.add_filter("lower", |v: &Value| to_str(v).to_lowercase());
    env.add_filter("capitalize", |v: &Value| capitalize(&to_str(v)));
    env.add_filter("replace", replace);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("indent", indent);
    env.add_filter("items", items);
    env.add_filter("sum", sum);
    env.add_filter("attr", attr);
    env.add_filter("wordcount", |v: &Value| to_str(v).split(is_space).filter(|w| !w.is_empty()).count());

    env.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
            || (v.kind() == ValueKind::Iterable && v.len().is_some())
    });
    env.add_test("iterable", |v: &Value| v.kind() != ValueKind::None && v.try_iter().is_ok());
    env.add_test("number", |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));

    env.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);

    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.set_unknown_method_callback(method);
}

fn fail<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.into()))
}

/// Returns the argument at position i or with that name.
fn argument(args: &[Value], kwargs: &Kwargs, i: usize, name: &str) -> Option<Value> {
    match args.get(i) {
        Some(v) => Some(v.clone()),
        None => kwargs.get::<Option<Value>>(name).ok().flatten(),
    }
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    fail(to_str(message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let Ok(pattern) = std::ffi::CString::new(format) else {
        return fail("embedded null character in a date format");
    };
    let mut buffer = vec![0u8; 256 + 16 * format.len()];
    // SAFETY: localtime_r fills the struct it is given, and strftime writes at
    // most the length of the buffer.
    let n = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut local: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut local).is_null() {
            return fail("the local time is not known");
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), pattern.as_ptr(), &local)
    };
    buffer.truncate(n);
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}

fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let truthy = |i, name| argument(&args, &kwargs, i, name).is_some_and(|v| v.is_true());
    let indent = match argument(&args, &kwargs, 1, "indent") {
        Some(v) if v.as_str().is_some() => Some(to_str(&v)),
        Some(v) if !v.is_none() => match i64::try_from(v) {
            Ok(n) => Some(" ".repeat(n.clamp(0, 64) as usize)),
            Err(_) => return fail("tojson: indent must be a number or a string"),
        },
        _ => None,
    };
    let (mut item_separator, mut key_separator) =
        (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string());
    if let Some(pair) = argument(&args, &kwargs, 2, "separators").filter(|v| !v.is_none()) {
        item_separator = to_str(&pair.get_item_by_index(0)?);
        key_separator = to_str(&pair.get_item_by_index(1)?);
    }
    let style = JsonStyle {
        ensure_ascii: truthy(0, "ensure_ascii"),
        sort_keys: truthy(3, "sort_keys"),
        indent,
        item_separator,
        key_separator,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    write_json(&mut out, value, &style, 0)?;
    Ok(out)
}

fn string(value: &Value) -> Value {
    match value.as_str() {
        Some(_) => value.clone(),
        None => Value::from(to_str(value)),
    }
}

fn trim(value: &Value, chars: Option<&Value>) -> Result<String, Error> {
    Ok(strip(&to_str(value), chars, true, true)?.to_string())
}

/// str.strip(), str.lstrip() or str.rstrip() of s.
fn strip<'s>(s: &'s str, chars: Option<&Value>, left: bool, right: bool) -> Result<&'s str, Error> {
    let set: Option<Vec<char>> = match chars {
        Some(v) if !v.is_none() => match v.as_str() {
            Some(set) => Some(set.chars().collect()),
            None => return fail("strip: the characters must be a string"),
        },
        _ => None,
    };
    charge(set.as_ref().map_or(0, |set| set.len().saturating_mul(s.len()) / 64));
    let dropped = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
    let s = if left { s.trim_start_matches(dropped) } else { s };
    Ok(if right { s.trim_end_matches(dropped) } else { s })
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    match value.len() {
        Some(n) => Ok(n),
        None => fail(format!("a value of type {} has no length", value.kind())),
    }
}

fn join(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let separator = argument(&args, &kwargs, 0, "d").map(|v| to_str(&v)).unwrap_or_default();
    let attribute = argument(&args, &kwargs, 1, "attribute").filter(|v| !v.is_none());
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (i, item) in value.try_iter()?.enumerate() {
        if i > 0 {
            out.push_str(&separator);
        }
        let item = match &attribute {
            Some(name) => member(&item, name)?,
            None => item,
        };
        out.push_str(&to_str(&item));
    }
    Ok(out)
}

/// Returns the member of that name. A name that is a list is refused, because hashing it
/// takes unlimited time.
fn member(value: &Value, name: &Value) -> Result<Value, Error> {
    check_key(name)?;
    value.get_item(name)
}

fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect(),
        None => String::new(),
    }
}

fn replace(value: &Value, old: &Value, new: &Value, count: Option<i64>) -> String {
    let (s, old, new) = (to_str(value), to_str(old), to_str(new));
    match count {
        Some(n) if n >= 0 => s.replacen(&old, &new, n as usize),
        _ => s.replace(&old, &new),
    }
}

fn int(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = argument(&args, &kwargs, 0, "default").unwrap_or_else(|| Value::from(0));
    let base = argument(&args, &kwargs, 1, "base").and_then(|v| u32::try_from(v).ok()).unwrap_or(10);
    kwargs.assert_all_used()?;
    let parsed = match value.as_str() {
        Some(s) => {
            let digits = s.trim_matches(is_space).replace('_', "");
            i128::from_str_radix(&digits, base.clamp(2, 36))
                .ok()
                .or_else(|| digits.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| x as i128))
        }
        None if value.kind() == ValueKind::Bool => Some(value.is_true() as i128),
        None if value.is_integer() => return Ok(value.clone()),
        None => f64::try_from(value.clone()).ok().filter(|x| x.is_finite()).map(|x| x as i128),
    };
    Ok(parsed.map_or(default, |n| i64::try_from(n).map(Value::from).unwrap_or_else(|_| Value::from(n))))
}

fn float(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = argument(&args, &kwargs, 0, "default").unwrap_or_else(|| Value::from(0.0));
    kwargs.assert_all_used()?;
    let parsed = match value.as_str() {
        Some(s) => s.trim_matches(is_space).parse::<f64>().ok(),
        None if value.kind() == ValueKind::Bool => Some(value.is_true() as u8 as f64),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(parsed.map_or(default, Value::from))
}

fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let other = argument(&args, &kwargs, 0, "default_value").unwrap_or_else(|| Value::from(""));
    let falsy_too = argument(&args, &kwargs, 1, "boolean").is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    Ok(if value.is_undefined() || (falsy_too && !value.is_true()) { other } else { value.clone() })
}

fn indent(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let width = match argument(&args, &kwargs, 0, "width") {
        Some(v) if v.as_str().is_some() => to_str(&v),
        Some(v) => " ".repeat(u16::try_from(v)? as usize),
        None => " ".repeat(4),
    };
    let first = argument(&args, &kwargs, 1, "first").is_some_and(|v| v.is_true());
    let blank = argument(&args, &kwargs, 2, "blank").is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let text = to_str(value) + "\n"; // as jinja2 does: the last line is kept if empty
    let lines = split_lines(&text, false);
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i == 0 && first) || (i > 0 && (blank || !line.is_empty())) {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => pairs(value),
        kind => fail(format!("can only get item pairs from a mapping, not {kind}")),
    }
}

fn sum(state: &State, value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let attribute = argument(&args, &kwargs, 0, "attribute").filter(|v| !v.is_none());
    let start = argument(&args, &kwargs, 1, "start");
    kwargs.assert_all_used()?;
    let mut terms: Vec<Value> = start.into_iter().collect();
    for item in value.try_iter()? {
        terms.push(match &attribute {
            Some(name) => member(&item, name)?,
            None => item,
        });
    }
    minijinja::filters::sum(state, Value::from(terms))
}

/// The filter attr sees a Python object's attributes, which a dict's items are not.
fn attr(value: &Value, name: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Map {
        return Ok(Value::UNDEFINED);
    }
    member(value, name)
}

fn pairs(map: &Value) -> Result<Value, Error> {
    let mut out = Vec::new();
    for key in map.try_iter()? {
        let item = map.get_item(&key)?;
        out.push(Value::from(vec![key, item]));
    }
    Ok(Value::from(out))
}

/// str.splitlines().
fn split_lines(s: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while let Some(at) = rest.find(is_end) {
        let mut end = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        if rest[at..].starts_with("\r\n") {
            end += 1;
        }
        lines.push(&rest[..if keep_ends { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// str.split() and str.rsplit() of s.
fn split(s: &str, separator: Option<&str>, limit: Option<usize>, from_right: bool) -> Result<Vec<String>, Error> {
    let limit = limit.unwrap_or(usize::MAX);
    let own = |parts: Vec<&str>| parts.into_iter().map(str::to_string).collect::<Vec<_>>();
    if let Some(separator) = separator {
        if separator.is_empty() {
            return fail("split: empty separator");
        }
        return Ok(if from_right {
            let mut parts: Vec<&str> = s.rsplitn(limit.saturating_add(1), separator).collect();
            parts.reverse();
            own(parts)
        } else {
            own(s.splitn(limit.saturating_add(1), separator).collect())
        });
    }
    let mut parts = Vec::new();
    let mut rest = s.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| parts.len() < limit) else {
            parts.push(rest);
            break;
        };
        let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        if from_right {
            parts.push(&rest[after..]);
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..at]);
            rest = rest[after..].trim_start_matches(is_space);
        }
    }
    if from_right {
        parts.reverse();
    }
    Ok(own(parts))
}

/// Methods of Python's str, list and dict that pycompat lacks.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    for v in args.iter().chain([value]) {
        charge(1 + v.as_str().map_or(0, |s| s.len() / 16));
    }
    match value.kind() {
        ValueKind::String => string_method(state, value, name, args),
        ValueKind::Map => match name {
            "items" => pairs(value),
            "keys" => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
            "values" => {
                let keys: Vec<Value> = value.try_iter()?.collect();
                Ok(Value::from(keys.iter().map(|k| value.get_item(k)).collect::<Result<Vec<_>, _>>()?))
            }
            "copy" => Ok(value.clone()),
            _ => {
                args.iter().take(1).try_for_each(check_key)?;
                pycompat::unknown_method_callback(state, value, name, args)
            }
        },
        ValueKind::Seq | ValueKind::Iterable => match name {
            "copy" => Ok(value.clone()),
            "index" => {
                let (wanted,): (&Value,) = from_args(args)?;
                charge(weigh(wanted).saturating_mul(items_of(value)));
                match value.try_iter()?.position(|v| &v == wanted) {
                    Some(i) => Ok(Value::from(i)),
                    None => fail("index: the value is not in the list"),
                }
            }
            _ => {
                charge(args.iter().map(weigh).sum::<usize>().saturating_mul(items_of(value)));
                pycompat::unknown_method_callback(state, value, name, args)
            }
        },
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn string_method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let s = value.as_str().unwrap_or_default();
    let is_all = |holds: fn(char) -> bool| Ok(Value::from(!s.is_empty() && s.chars().all(holds)));
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&Value>,) = from_args(args)?;
            Ok(Value::from(strip(s, chars, name != "rstrip", name != "lstrip")?))
        }
        "split" | "rsplit" => {
            let (positional, kwargs): (Rest<Value>, Kwargs) = from_args(args)?;
            let separator = argument(&positional, &kwargs, 0, "sep").filter(|v| !v.is_none());
            let limit = argument(&positional, &kwargs, 1, "maxsplit").and_then(|v| usize::try_from(v).ok());
            if separator.as_ref().is_some_and(|v| v.as_str().is_none()) {
                return fail("split: the separator must be a string");
            }
            let separator = separator.map(|v| to_str(&v));
            Ok(Value::from(split(s, separator.as_deref(), limit, name == "rsplit")?))
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            Ok(split_lines(s, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect())
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let at = if name.starts_with('r') { s.rfind(what) } else { s.find(what) };
            match at {
                Some(at) => Ok(Value::from(s[..at].chars().count())),
                None if name.ends_with("find") => Ok(Value::from(-1)),
                None => fail("index: substring not found"),
            }
        }
        "removeprefix" | "removesuffix" => {
            let (what,): (&str,) = from_args(args)?;
            let cut = if name == "removeprefix" { s.strip_prefix(what) } else { s.strip_suffix(what) };
            Ok(Value::from(cut.unwrap_or(s)))
        }
        "partition" | "rpartition" => {
            let (what,): (&str,) = from_args(args)?;
            let (parts, missing) = if name == "partition" {
                (s.split_once(what), [s, "", ""])
            } else {
                (s.rsplit_once(what), ["", "", s])
            };
            let parts = parts.map_or(missing, |(head, tail)| [head, what, tail]);
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "capitalize" => Ok(Value::from(capitalize(s))),
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let missing = width.min(1000).saturating_sub(s.chars().count());
            let (sign, digits) = match s.chars().next() {
                Some('+' | '-') => s.split_at(1),
                _ => ("", s),
            };
            Ok(Value::from(format!("{sign}{}{digits}", "0".repeat(missing))))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let missing = width.min(10_000).saturating_sub(s.chars().count());
            let left = match name {
                "ljust" => 0,
                "rjust" => missing,
                _ => missing / 2 + (missing & width & 1),
            };
            let fill = fill.unwrap_or(" ");
            Ok(Value::from(format!("{}{s}{}", fill.repeat(left), fill.repeat(missing - left))))
        }
        "isspace" => is_all(is_space),
        "isdigit" | "isnumeric" | "isdecimal" => is_all(char::is_numeric),
        "isalpha" => is_all(char::is_alphabetic),
        "isalnum" => is_all(char::is_alphanumeric),
        "islower" | "isupper" => {
            let (wanted, other): (fn(char) -> bool, fn(char) -> bool) = if name == "islower" {
                (char::is_lowercase, char::is_uppercase)
            } else {
                (char::is_uppercase, char::is_lowercase)
            };
            Ok(Value::from(s.chars().any(wanted) && !s.chars().any(other)))
        }
        "join" => {
            let (list,): (&Value,) = from_args(args)?;
            let mut parts = Vec::new();
            for item in list.try_iter()? {
                match item.as_str() {
                    Some(text) => parts.push(text.to_string()),
                    None => return fail(format!("join: a string is needed, not {}", item.kind())),
                }
            }
            Ok(Value::from(parts.join(s)))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}
