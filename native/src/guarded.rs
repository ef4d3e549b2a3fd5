//! Compiled templates whose instructions all cost about the same. The fuel of minijinja
//! counts instructions, but some of its operators take unlimited time or memory:
//! comparisons of lists that contain the same list many times, `[0] * n`, which is a list
//! of n items without memory, and slices of slices. They become filters of this file, which
//! count their work.

use crate::limits::{charge, reached};
use crate::python::to_str;
use minijinja::machinery::ast::{BinOpKind, Expr};
use minijinja::machinery::{tokenize, Instruction, Instructions, Token, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{tests, Environment, Error, ErrorKind, State};

/// Maximum tokens of a tag: the compiler recurses for each operator of a chain.
const MAX_TAG: usize = 2000;
/// Maximum nesting of a value that is compared or printed.
pub const MAX_NESTING: usize = 1000;
/// Number of filters of a template that minijinja refers to by number; it refers to others
/// by name.
const NUMBERED: u8 = 50;
const UNNUMBERED: u8 = !0;

fn fail<T>(message: &str) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// Returns an error if a tag of the template has too many tokens.
pub fn check_tags(template: &str) -> Result<(), String> {
    let mut length = 0;
    for token in tokenize(template, false, SyntaxConfig::default(), WhitespaceConfig::default()) {
        let Ok((token, span)) = token else {
            return Ok(()); // the parser reports the error
        };
        length = if matches!(token, Token::BlockStart | Token::VariableStart) { 0 } else { length + 1 };
        if length > MAX_TAG {
            return Err(format!("a tag has more than {MAX_TAG} tokens (in line {})", span.start_line));
        }
    }
    Ok(())
}

/// Returns an error if the compiler would compute a constant that takes unlimited time, or
/// one that Python prints differently. Its parts have been checked before.
pub fn check_constant(e: &Expr) -> Result<(), String> {
    let Expr::BinOp(op) = e else {
        return Ok(());
    };
    if !matches!(op.op, BinOpKind::Mul | BinOpKind::Concat) {
        return Ok(());
    }
    let (Some(left), Some(right)) = (op.left.as_const(), op.right.as_const()) else {
        return Ok(());
    };
    let is_any = |what: fn(&Value) -> bool| what(&left) || what(&right);
    match op.op {
        BinOpKind::Mul if is_any(|v| v.as_object().is_some()) => {
            Err("the template multiplies a constant list, which is not supported".to_string())
        }
        BinOpKind::Concat if is_any(|v| v.as_str().is_none() && !v.is_integer()) => {
            Err("the template joins constants other than strings, which is not supported".to_string())
        }
        _ => Ok(()),
    }
}

/// Numbers the filters that are added to a template.
struct Numbers {
    next: u8,
    known: Vec<(&'static str, u8)>,
}

impl Numbers {
    fn apply(&mut self, name: &'static str, arguments: u16) -> Instruction<'static> {
        let number = self.known.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
        let number = number.unwrap_or_else(|| {
            let number = if self.next < NUMBERED { self.next } else { UNNUMBERED };
            self.next = self.next.saturating_add(1);
            self.known.push((name, number));
            number
        });
        Instruction::ApplyFilter(name, Some(arguments), number)
    }
}

fn target<'i>(instruction: &'i mut Instruction<'static>) -> Option<&'i mut u32> {
    match instruction {
        Instruction::Jump(to)
        | Instruction::JumpIfFalse(to)
        | Instruction::JumpIfFalseOrPop(to)
        | Instruction::JumpIfTrueOrPop(to)
        | Instruction::Iterate(to)
        | Instruction::BuildMacro(_, to, _) => Some(to),
        _ => None,
    }
}

/// Returns the instructions with counting operators, and jumps adjusted to them.
pub fn guarded(code: &Instructions<'static>) -> Result<Instructions<'static>, String> {
    let mut all: Vec<Instruction<'static>> = (0..).map_while(|i| code.get(i).cloned()).collect();
    let mut numbers = Numbers { next: 0, known: Vec::new() };
    let mut reached_by_jump = vec![false; all.len() + 1];
    for instruction in &mut all {
        if let Instruction::ApplyFilter(_, _, number) = instruction {
            numbers.next = numbers.next.max(number.saturating_add(1));
        }
        if let Some(to) = target(instruction) {
            reached_by_jump[(*to as usize).min(code.len())] = true;
        }
    }
    let mut out: Vec<(Instruction<'static>, u32)> = Vec::with_capacity(all.len() + all.len() / 4);
    let mut moved = Vec::with_capacity(all.len() + 1);
    for (i, instruction) in all.iter().enumerate() {
        moved.push(out.len() as u32);
        // The constant on top of the stack, if it is one on every path to here.
        let constant = match i.checked_sub(1).map(|before| &all[before]) {
            Some(Instruction::LoadConst(value)) if !reached_by_jump[i] => Some(value),
            _ => None,
        };
        let with_scalar = constant.is_some_and(|v| v.as_object().is_none());
        let with_text = constant.is_some_and(|v| v.as_str().is_some());
        let mut add = |instruction| out.push((instruction, i as u32));
        match instruction {
            Instruction::Eq if !with_scalar => add(numbers.apply("_eq", 2)),
            Instruction::Ne if !with_scalar => add(numbers.apply("_ne", 2)),
            Instruction::Lt if !with_scalar => add(numbers.apply("_lt", 2)),
            Instruction::Lte if !with_scalar => add(numbers.apply("_le", 2)),
            Instruction::Gt if !with_scalar => add(numbers.apply("_gt", 2)),
            Instruction::Gte if !with_scalar => add(numbers.apply("_ge", 2)),
            Instruction::In => add(numbers.apply("_in", 2)),
            Instruction::Add if !with_text => add(numbers.apply("_add", 2)),
            Instruction::Mul => add(numbers.apply("_mul", 2)),
            Instruction::StringConcat => add(numbers.apply("_concat", 2)),
            Instruction::Slice => add(numbers.apply("_slice", 4)),
            Instruction::GetItem if !with_text => add(numbers.apply("_item", 2)),
            Instruction::BuildMap(pairs) if *pairs > 0 => match u16::try_from(2 * pairs) {
                Ok(n) => add(numbers.apply("_dict", n)),
                Err(_) => return Err("a dict has too many items".to_string()),
            },
            Instruction::CompareAndPreserve(_) => {
                add(numbers.apply("_comparable", 1));
                add(instruction.clone());
            }
            Instruction::PushLoop(_) => {
                add(numbers.apply("_iterated", 1));
                add(instruction.clone());
            }
            Instruction::SetAttr(_) => {
                add(Instruction::Swap);
                add(numbers.apply("_storable", 1));
                add(Instruction::Swap);
                add(instruction.clone());
            }
            Instruction::CallMethod("changed", _) => {
                return Err("the template uses loop.changed, which is not supported".to_string())
            }
            _ => add(instruction.clone()),
        }
    }
    moved.push(out.len() as u32);
    let mut result = Instructions::new(code.name(), code.source());
    for (mut instruction, was) in out {
        if let Some(to) = target(&mut instruction) {
            *to = moved[(*to as usize).min(code.len())];
        }
        match code.get_line(was) {
            Some(line) => result.add_with_line(instruction, line as u16),
            None => result.add(instruction),
        };
    }
    Ok(result)
}

/// Adds the filters that `guarded` uses, and replaces those filters and tests of minijinja
/// that compare values.
pub fn install(env: &mut Environment) {
    env.add_filter("_eq", |a: &Value, b: &Value| equal(a, b));
    env.add_filter("_ne", |a: &Value, b: &Value| !equal(a, b));
    env.add_filter("_lt", |a: &Value, b: &Value| counted(a, b, |a, b| a < b));
    env.add_filter("_le", |a: &Value, b: &Value| counted(a, b, |a, b| a <= b));
    env.add_filter("_gt", |a: &Value, b: &Value| counted(a, b, |a, b| a > b));
    env.add_filter("_ge", |a: &Value, b: &Value| counted(a, b, |a, b| a >= b));
    env.add_filter("_in", contains);
    env.add_filter("_add", add);
    env.add_filter("_mul", mul);
    env.add_filter("_concat", |a: &Value, b: &Value| {
        let mut text = to_str(a);
        text.push_str(&to_str(b));
        text
    });
    env.add_filter("_slice", slice);
    env.add_filter("_item", item);
    env.add_filter("_dict", dict);
    env.add_filter("_comparable", |v: Value| {
        weigh(&v);
        v
    });
    env.add_filter("_storable", storable);
    env.add_filter("_iterated", |v: Value| if v.is_none() { fail("None is not iterable") } else { Ok(v) });

    for name in ["eq", "equalto", "=="] {
        env.add_test(name, equal);
    }
    for name in ["ne", "!="] {
        env.add_test(name, |a: &Value, b: &Value| !equal(a, b));
    }
    for name in ["lt", "lessthan", "<"] {
        env.add_test(name, |a: &Value, b: &Value| counted(a, b, |a, b| a < b));
    }
    for name in ["le", "<="] {
        env.add_test(name, |a: &Value, b: &Value| counted(a, b, |a, b| a <= b));
    }
    for name in ["gt", "greaterthan", ">"] {
        env.add_test(name, |a: &Value, b: &Value| counted(a, b, |a, b| a > b));
    }
    for name in ["ge", ">="] {
        env.add_test(name, |a: &Value, b: &Value| counted(a, b, |a, b| a >= b));
    }
    env.add_test("in", contains);

    use minijinja::filters;
    env.add_filter("_sort", filters::sort);
    env.add_filter("_unique", filters::unique);
    env.add_filter("_min", filters::min);
    env.add_filter("_max", filters::max);
    env.add_filter("_dictsort", filters::dictsort);
    env.add_filter("_groupby", filters::groupby);
    for (name, own) in [
        ("sort", "_sort"),
        ("unique", "_unique"),
        ("min", "_min"),
        ("max", "_max"),
        ("dictsort", "_dictsort"),
        ("groupby", "_groupby"),
    ] {
        env.add_filter(name, move |state: &State, args: Rest<Value>| {
            for v in args.iter() {
                weigh(v);
            }
            state.apply_filter(own, &args)
        });
    }
    // jinja2 lacks these, or prints them differently.
    for name in ["chain", "zip", "lines", "split", "bool", "pprint"] {
        env.remove_filter(name);
    }
    env.remove_global("debug");
}

/// Counts the items of a value, including nested ones, and returns their number. A list
/// that occurs twice counts twice, because it is compared twice.
pub fn weigh(value: &Value) -> usize {
    if value.as_object().is_none() {
        let weight = 1 + value.as_str().map_or(0, |s| s.len() / 64);
        charge(weight);
        return weight;
    }
    let mut weight = 0;
    let mut left = vec![(value.clone(), 0)];
    while let Some((value, depth)) = left.pop() {
        let own = 1 + value.as_str().map_or(0, |s| s.len() / 64);
        charge(own);
        weight += own;
        let is_map = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => false,
            ValueKind::Map => true,
            _ => continue,
        };
        if depth == MAX_NESTING {
            reached("nesting");
        }
        for item in value.try_iter().into_iter().flatten() {
            charge(1);
            if is_map {
                left.push((value.get_item(&item).unwrap_or_default(), depth + 1));
            }
            left.push((item, depth + 1));
        }
    }
    weight
}

/// Compares two values. The cost is that of the smaller one.
fn counted(a: &Value, b: &Value, compare: fn(&Value, &Value) -> bool) -> bool {
    match (a.as_object(), b.as_object()) {
        (Some(_), Some(_)) => {
            weigh(b);
        }
        (None, None) => charge(1 + a.as_str().map_or(0, |s| s.len() / 64)),
        _ => {}
    }
    compare(a, b)
}

fn equal(a: &Value, b: &Value) -> bool {
    counted(a, b, |a, b| a == b)
}

/// Returns an error for a value that cannot be the key of a dict in Python.
pub fn check_key(key: &Value) -> Result<(), Error> {
    match key.as_object() {
        Some(_) => fail("a list or dict cannot be the key of a dict"),
        None => Ok(()),
    }
}

fn contains(state: &State, value: &Value, container: &Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::String => match (container.as_str(), value.as_str()) {
            (Some(text), Some(part)) => {
                charge(1 + text.len() / 16);
                Ok(text.contains(part))
            }
            _ => fail("in: a string is needed on the left of a string"),
        },
        ValueKind::Map => {
            check_key(value)?;
            tests::is_in(state, value, container)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            charge(weigh(value).saturating_mul(length(container)));
            tests::is_in(state, value, container)
        }
        ValueKind::Undefined => Ok(false),
        kind => fail(&format!("in: {kind} is not iterable")),
    }
}

/// The number of items, or its upper bound.
pub fn length(value: &Value) -> usize {
    value.len().unwrap_or(1 << 20)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn collect(value: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::with_capacity(length(value).min(1 << 16));
    for item in value.try_iter()? {
        charge(1);
        items.push(item);
    }
    Ok(items)
}

fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(a) && is_list(b) {
        let mut items = collect(a)?;
        items.extend(collect(b)?);
        return Ok(Value::from(items));
    }
    if ![a, b].iter().all(|v| matches!(v.kind(), ValueKind::Number | ValueKind::Bool)) {
        return fail(&format!("tried to use + operator on unsupported types {} and {}", a.kind(), b.kind()));
    }
    minijinja::filters::sum(state, Value::from(vec![a.clone(), b.clone()]))
}

fn mul(a: &Value, b: &Value) -> Result<Value, Error> {
    let (a, b) = if b.as_str().is_some() || is_list(b) { (b, a) } else { (a, b) };
    let whole = |v: &Value| match v.kind() {
        ValueKind::Bool => Some(v.is_true() as i128),
        ValueKind::Number if v.is_integer() => i128::try_from(v.clone()).ok(),
        _ => None,
    };
    if a.as_str().is_some() || is_list(a) {
        let Some(n) = whole(b) else {
            return fail("a string or list can only be multiplied with an integer");
        };
        let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
        if let Some(text) = a.as_str() {
            charge(text.len().saturating_mul(n) / 64);
            return Ok(Value::from(text.repeat(n)));
        }
        let items = collect(a)?;
        let len = items.len().saturating_mul(n);
        charge(len);
        return Ok(Value::from(items.iter().cycle().take(len).cloned().collect::<Vec<_>>()));
    }
    match (whole(a), whole(b)) {
        (Some(a), Some(b)) => match a.checked_mul(b) {
            Some(n) => Ok(i64::try_from(n).map(Value::from).unwrap_or_else(|_| Value::from(n))),
            None => fail("a product exceeds 128 bits"),
        },
        _ => match (f64::try_from(a.clone()), f64::try_from(b.clone())) {
            (Ok(a), Ok(b)) => Ok(Value::from(a * b)),
            _ => fail(&format!("tried to use * operator on unsupported types {} and {}", a.kind(), b.kind())),
        },
    }
}

/// value[start:stop:step], as Python computes the indices.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |v: &Value| if v.is_none() { Ok(None) } else { i64::try_from(v.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return fail("cannot slice by step size of 0");
    }
    if let Some(text) = value.as_str() {
        charge(1 + text.len() / 16);
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(indices(chars.len(), start, stop, step).map(|i| chars[i]).collect::<String>()));
    }
    if !is_list(value) {
        return fail(&format!("value of type {} cannot be sliced", value.kind()));
    }
    let items = collect(value)?;
    Ok(Value::from(indices(items.len(), start, stop, step).map(|i| items[i].clone()).collect::<Vec<_>>()))
}

fn indices(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let len = len as i64;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |at: i64| if at < 0 { at.saturating_add(len).max(lowest) } else { at.min(highest) };
    let first = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let end = stop.map_or(if step > 0 { highest } else { lowest }, clamp);
    std::iter::successors(Some(first), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < end } else { *at > end })
        .map(|at| at as usize)
}

fn item(container: &Value, key: &Value) -> Result<Value, Error> {
    check_key(key)?;
    match container.kind() {
        ValueKind::String => charge(1 + container.as_str().map_or(0, |s| s.len() / 16)),
        ValueKind::Iterable => charge(length(container)),
        _ => {}
    }
    container.get_item(key)
}

fn dict(pairs: Rest<Value>) -> Result<Value, Error> {
    let mut map: indexmap::IndexMap<Value, Value> = indexmap::IndexMap::with_capacity(pairs.len() / 2);
    for pair in pairs.chunks_exact(2) {
        check_key(&pair[0])?;
        map.insert(pair[0].clone(), pair[1].clone());
    }
    Ok(Value::from(map))
}

/// Returns a value that a namespace may hold: one without a namespace in it, and without a
/// macro or loop, which may contain one. A cycle would never be freed.
fn storable(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() {
        return Ok(value);
    }
    let mut left = vec![(value.clone(), 0)];
    while let Some((value, depth)) = left.pop() {
        let Some(object) = value.as_object() else {
            continue;
        };
        charge(1);
        let is_map = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => false,
            ValueKind::Map if !object.type_name().ends_with("Namespace") => true,
            _ => return fail("a namespace cannot hold a namespace, macro or loop"),
        };
        if depth == MAX_NESTING {
            reached("nesting");
        }
        for item in value.try_iter().into_iter().flatten() {
            charge(1);
            let item = if is_map { value.get_item(&item).unwrap_or_default() } else { item };
            if item.as_object().is_some() {
                left.push((item, depth + 1));
            }
        }
    }
    Ok(value)
}
