//! The C functions that render chat templates. All of them catch panics, which must
//! not unwind into Go.

use crate::{detect, filters, python, source};
use minijinja::machinery::{parse, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Output, State, UndefinedBehavior, Value};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::panic::{catch_unwind, AssertUnwindSafe};

const NAME: &str = "chat";

/// A compiled template. Rendering only reads it, so threads may share it.
pub struct ChatTemplate {
    env: Environment<'static>,
    wants_parts: bool,
}

/// Address and length of a list that Go owns until it frees it. The address of an empty
/// list is null, because Go treats Rust's dangling address as an invalid pointer.
pub(crate) fn handed_over<T>(list: Vec<T>) -> (*mut T, usize) {
    if list.is_empty() {
        return (std::ptr::null_mut(), 0);
    }
    let boxed = list.into_boxed_slice();
    let len = boxed.len();
    (Box::into_raw(boxed).cast(), len)
}

/// Bytes allocated by the library, to be freed with chat_bytes_free.
#[repr(C)]
pub struct chat_bytes {
    data: *mut u8,
    len: usize,
}

impl chat_bytes {
    pub(crate) fn new(bytes: Vec<u8>) -> chat_bytes {
        let (data, len) = handed_over(bytes);
        chat_bytes { data, len }
    }
}

/// Compiles a template in UTF-8. On failure it returns null and sets error to the
/// reason.
///
/// # Safety
/// source must point to len readable bytes, error to a writable chat_bytes.
#[no_mangle]
pub unsafe extern "C" fn chat_template_new(source: *const u8, len: usize, error: *mut chat_bytes) -> *mut ChatTemplate {
    let bytes = slice(source, len);
    match guard(|| compile(bytes)) {
        Ok(template) => Box::into_raw(Box::new(template)),
        Err(reason) => {
            *error = chat_bytes::new(reason.into_bytes());
            std::ptr::null_mut()
        }
    }
}

/// Returns whether the template expects message content as a list of parts (1) or
/// as one string (0).
///
/// # Safety
/// template must come from chat_template_new and not be freed yet.
#[no_mangle]
pub unsafe extern "C" fn chat_template_wants_parts(template: *const ChatTemplate) -> i32 {
    (*template).wants_parts as i32
}

/// Renders the template with a JSON object as its variables, key order kept.
/// Returns 1 with the text in out, or 0 with the reason in out.
///
/// # Safety
/// template must come from chat_template_new and not be freed yet, context point
/// to len readable bytes, out to a writable chat_bytes.
#[no_mangle]
pub unsafe extern "C" fn chat_render(
    template: *const ChatTemplate,
    context: *const u8,
    len: usize,
    out: *mut chat_bytes,
) -> i32 {
    let (template, bytes) = (&*template, slice(context, len));
    let (ok, text) = match guard(|| render(template, bytes)) {
        Ok(text) => (1, text),
        Err(reason) => (0, reason.into_bytes()),
    };
    *out = chat_bytes::new(text);
    ok
}

/// Frees bytes that another function of this file returned.
///
/// # Safety
/// bytes must come from this library and be freed once.
#[no_mangle]
pub unsafe extern "C" fn chat_bytes_free(bytes: chat_bytes) {
    if !bytes.data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(bytes.data, bytes.len)));
    }
}

/// Frees a template.
///
/// # Safety
/// template must come from chat_template_new and be freed once, with no render
/// of it under way.
#[no_mangle]
pub unsafe extern "C" fn chat_template_free(template: *mut ChatTemplate) {
    if !template.is_null() {
        drop(Box::from_raw(template));
    }
}

pub(crate) unsafe fn slice<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if len == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(data, len)
    }
}

fn guard<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("the template engine panicked".to_string()))
}

fn compile(template: &[u8]) -> Result<ChatTemplate, String> {
    let text = std::str::from_utf8(template).map_err(|e| format!("the template is not UTF-8: {e}"))?;
    let text = source::generation_as_with(text);
    let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let wants_parts = parse(&text, NAME, SyntaxConfig::default(), whitespace)
        .map(|tree| detect::wants_parts(&tree))
        .map_err(|e| describe(&e))?;

    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(format_as_python);
    filters::install(&mut env);
    env.add_template_owned(NAME, source::as_python(&text)).map_err(|e| describe(&e))?;
    // jinja2 defines these where minijinja leaves them undefined, so the text
    // would differ without an error.
    let unknown = env.get_template(NAME).map_err(|e| describe(&e))?.undeclared_variables(false);
    if let Some(name) = ["varargs", "kwargs"].into_iter().find(|name| unknown.contains(*name)) {
        return Err(format!("the template uses {name}, which is not supported"));
    }
    Ok(ChatTemplate { env, wants_parts })
}

fn format_as_python(out: &mut Output, _: &State, value: &Value) -> Result<(), minijinja::Error> {
    match value.as_str() {
        Some(s) => out.write_str(s)?,
        None => out.write_str(&python::to_str(value))?,
    }
    Ok(())
}

fn render(template: &ChatTemplate, context: &[u8]) -> Result<Vec<u8>, String> {
    // Most texts are about as long as their context: allocating that size avoids copies while growing.
    let mut text = Vec::with_capacity(context.len() + 256);
    let Json(context) = serde_json::from_slice(context).map_err(|e| format!("reading the request: {e}"))?;
    let rendered = template.env.get_template(NAME).and_then(|t| t.render_captured_to(context, &mut text).map(|_| ()));
    rendered.map_err(|e| describe(&e))?;
    Ok(text)
}

/// Formats an error on one line: failure, position and cause.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// A template value parsed from JSON like Python's json.loads.
struct Json(Value);

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json(Value::from(())))
    }

    fn visit_bool<E>(self, v: bool) -> Result<Json, E> {
        Ok(Json(Value::from(v)))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Json, E> {
        Ok(Json(Value::from(v)))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Json, E> {
        Ok(Json(Value::from(v)))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Json, E> {
        // serde_json reads an integer beyond 64 bits as a float; Python keeps
        // every digit, so it would be printed differently.
        if v.abs() >= 18446744073709551616.0 {
            return Err(E::custom("a number beyond 64 bits"));
        }
        Ok(Json(Value::from(v)))
    }

    fn visit_str<E>(self, v: &str) -> Result<Json, E> {
        Ok(Json(Value::from(v)))
    }

    fn visit_string<E>(self, v: String) -> Result<Json, E> {
        Ok(Json(Value::from(v)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut out: Vec<Value> = Vec::new();
        while let Some(Json(item)) = items.next_element()? {
            out.push(item);
        }
        Ok(Json(Value::from(out)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut out: indexmap::IndexMap<Value, Value> = indexmap::IndexMap::new();
        while let Some((key, Json(item))) = entries.next_entry::<String, Json>()? {
            if out.len() > 1 << 20 {
                return Err(A::Error::custom("an object with more than a million keys"));
            }
            out.insert(Value::from(key), item);
        }
        Ok(Json(Value::from(out)))
    }
}
