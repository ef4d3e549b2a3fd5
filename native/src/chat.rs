//! The C functions that render chat templates. All of them catch panics, which must
//! not unwind into Go.

use crate::limits::{within, Failure, Limits, REFUSES};
use crate::{detect, filters, guarded, python, source, stack};
use minijinja::machinery::{make_string_output, parse, CompiledTemplate, Instructions, TemplateConfig, Vm, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Output, State, UndefinedBehavior, Value};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

const NAME: &str = "chat";

const MIB: usize = 1 << 20;

/// Maximum instructions of a render, by the maximum size of the context in bytes. Templates
/// of known models take at most about 250 for a message, which has 30 bytes or more.
const FUEL: [(u64, usize); 4] = [(1 << 18, 16 << 10), (1 << 20, 64 << 10), (1 << 22, 256 << 10), (1 << 24, usize::MAX)];

/// Maximum text for a context of that many bytes.
fn max_text(context: usize) -> usize {
    MIB + 16 * context
}

/// A compiled template. Rendering only reads it, so threads may share it.
pub struct ChatTemplate {
    code: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    environments: Vec<Environment<'static>>, // one for each of FUEL
    wants_parts: bool,
    _text: Text, // last: the fields above refer to it
}

/// Text that lives until it is dropped, at an address that does not change.
struct Text(*mut str);

impl Text {
    fn new(text: String) -> Text {
        Text(Box::into_raw(text.into_boxed_str()))
    }

    /// # Safety
    /// The text must not be used after self is dropped.
    unsafe fn get(&self) -> &'static str {
        &*self.0
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: it came from a box.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

// SAFETY: nothing changes the text.
unsafe impl Send for Text {}
unsafe impl Sync for Text {}

/// Why there is no result: the template's own error, or the limit that it reached.
enum Problem {
    Error(String),
    Limit(String),
}

impl From<String> for Problem {
    fn from(reason: String) -> Problem {
        Problem::Error(reason)
    }
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
    let limits = Limits { memory: 32 * MIB + 256 * len, turnover: 1024 * MIB, work: 1 << 24 };
    match on_large(|| settled(within(limits, || compile(bytes)))?) {
        Ok(template) => Box::into_raw(Box::new(template)),
        Err(Problem::Error(reason) | Problem::Limit(reason)) => {
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
/// Returns 1 with the text in out, 0 with the reason in out, or 2 with the limit in out
/// that the template reached.
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
    let (ok, text) = match render(template, bytes) {
        Ok(text) => (1, text.into_bytes()),
        Err(Problem::Error(reason)) => (0, reason.into_bytes()),
        Err(Problem::Limit(reason)) => (2, reason.into_bytes()),
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

/// Runs a call on a large stack: values and expressions may be nested deeply, and freeing
/// them recurses for each level.
fn on_large<T>(call: impl FnOnce() -> Result<T, Problem>) -> Result<T, Problem> {
    stack::on_large(call).unwrap_or_else(|| Err(Problem::Error("no memory for the template engine".to_string())))
}

fn compile(template: &[u8]) -> Result<ChatTemplate, Problem> {
    let text = std::str::from_utf8(template).map_err(|e| format!("the template is not UTF-8: {e}"))?;
    let text = Text::new(source::generation_as_with(text));
    // SAFETY: the result owns the text, and all that refers to it.
    let source = unsafe { text.get() };
    guarded::check_tags(source)?;
    let whitespace = || WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let wants_parts = {
        let tree = parse(source, NAME, SyntaxConfig::default(), whitespace()).map_err(|e| describe(&e))?;
        for operator in detect::operators(&tree) {
            guarded::check_constant(operator)?;
        }
        detect::wants_parts(&tree)
    };

    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(format_as_python);
    guarded::install(&mut env);
    filters::install(&mut env);
    // jinja2 defines these where minijinja leaves them undefined, so the text
    // would differ without an error.
    let unknown = env.template_from_str(source).map_err(|e| describe(&e))?.undeclared_variables(false);
    if let Some(name) = ["varargs", "kwargs"].into_iter().find(|name| unknown.contains(*name)) {
        return Err(format!("the template uses {name}, which is not supported").into());
    }
    let config = TemplateConfig {
        syntax_config: SyntaxConfig::default(),
        ws_config: whitespace(),
        default_auto_escape: Arc::new(|_: &str| AutoEscape::None),
    };
    let compiled = CompiledTemplate::new(NAME, source, &config).map_err(|e| describe(&e))?;
    let code = guarded::guarded(&compiled.instructions)?;
    let mut blocks = BTreeMap::new();
    for (name, block) in &compiled.blocks {
        blocks.insert(*name, guarded::guarded(block)?);
    }
    let fueled = |(fuel, _)| {
        let mut env = env.clone();
        env.set_fuel(Some(fuel));
        env
    };
    Ok(ChatTemplate { code, blocks, environments: FUEL.map(fueled).into(), wants_parts, _text: text })
}

fn format_as_python(out: &mut Output, _: &State, value: &Value) -> Result<(), minijinja::Error> {
    match value.as_str() {
        Some(s) => out.write_str(s)?,
        None => out.write_str(&python::to_str(value))?,
    }
    Ok(())
}

fn render(template: &ChatTemplate, context: &[u8]) -> Result<String, Problem> {
    let size = context.len();
    // Short lists take the most memory per byte. A client's request must not end the
    // process.
    let (memory, turnover) = if REFUSES { (MIB + 64 * size, MIB + 256 * size) } else { (usize::MAX, usize::MAX) };
    let limits = Limits { memory, turnover, work: 0 };
    let fuel = FUEL.iter().position(|(_, up_to)| size <= *up_to).unwrap_or(0);
    on_large(|| {
        // Exceeding the limits here is caused by the request, not by the template.
        let Json(context) = match within(limits, || serde_json::from_slice(context)) {
            Ok(read) => read.map_err(|e| format!("reading the request: {e}"))?,
            Err(_) => return Err("the request takes too much memory".to_string().into()),
        };
        let limits = Limits {
            memory: 16 * MIB + max_text(size),
            turnover: 1024 * MIB + 256 * size,
            work: (1 << 24) + 16 * size,
        };
        settled(within(limits, || {
            // Most texts are about as long as their context: allocating that size avoids copies while growing.
            let mut text = String::with_capacity(size + 256);
            let mut out = make_string_output(&mut text);
            let vm = Vm::new(&template.environments[fuel]);
            let rendered = vm.eval(&template.code, context, &template.blocks, &mut out, AutoEscape::None).map(|_| ());
            rendered.map_err(|e| if out_of_fuel(&e) { Problem::Limit(describe(&e)) } else { Problem::Error(describe(&e)) })?;
            if text.len() > max_text(size) {
                return Err(Problem::Limit(format!("it renders {} bytes; the limit is {}", text.len(), max_text(size))));
            }
            Ok(text)
        }))?
    })
}

fn settled<T>(result: Result<T, Failure>) -> Result<T, Problem> {
    result.map_err(|failure| match failure {
        Failure::Limit(limit) => Problem::Limit(format!("it exceeds the limit of {limit}")),
        Failure::Panic => Problem::Error("the template engine panicked".to_string()),
    })
}

fn out_of_fuel(error: &minijinja::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(e) = cause {
        if e.downcast_ref::<minijinja::Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return true;
        }
        cause = e.source();
    }
    false
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
