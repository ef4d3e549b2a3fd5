//! vLLM's detection of the content format that a chat template expects: "openai"
//! (a list of parts) when some loop of the template runs over a message's content,
//! else "string". It follows the rules of vllm/renderers/hf.py on minijinja's tree.

use crate::limits::charge;
use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};
use minijinja::Value;
use std::collections::{HashMap, HashSet, VecDeque};

/// An expression that vLLM's rules do not support; vLLM then assumes "string".
struct Unknown;

/// The parts of a template that the rules use, in the order of the source.
#[derive(Default)]
struct Found<'t, 's> {
    assigns: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    loops: Vec<&'t ForLoop<'s>>,
    calls: Vec<&'t Call<'s>>,
    macros: Vec<&'t Macro<'s>>,
    operators: Vec<&'t Expr<'s>>, // of two operands, each after its operands
}

/// Returns whether the template expects message content as a list of parts.
pub fn wants_parts(template: &Stmt) -> bool {
    let mut found = Found::default();
    statement(template, &mut found);
    iterates_content(&found).unwrap_or(false)
}

/// Returns the operators of a template, each after its operands.
pub fn operators<'t, 's>(template: &'t Stmt<'s>) -> Vec<&'t Expr<'s>> {
    let mut found = Found::default();
    statement(template, &mut found);
    found.operators
}

fn iterates_content(found: &Found) -> Result<bool, Unknown> {
    let messages = message_names(found)?;
    let is_content = |e: &Expr| messages.iter().any(|name| is_access(e, name, Some("content")));

    let mut parameters: HashMap<*const ForLoop, HashSet<&str>> = HashMap::new();
    let mut in_macros: HashSet<*const ForLoop> = HashSet::new();
    for declared in &found.macros {
        let names: Vec<&str> = declared.args.iter().filter_map(var_name).collect();
        let mut bound: HashSet<&str> = HashSet::new();
        for call in &found.calls {
            charge(1);
            if var_name(&call.expr) != Some(declared.name) {
                continue;
            }
            let mut position = 0;
            for arg in &call.args {
                match arg {
                    CallArg::Pos(e) => {
                        if position < names.len() && is_content(e) {
                            bound.insert(names[position]);
                        }
                        position += 1;
                    }
                    CallArg::Kwarg(key, e) if is_content(e) => {
                        bound.extend(names.iter().find(|name| *name == key));
                    }
                    _ => {}
                }
            }
        }
        let mut inner = Found::default();
        statements(&declared.body, &mut inner);
        for l in inner.loops {
            in_macros.insert(l as *const _);
            if !bound.is_empty() {
                parameters.insert(l as *const _, bound.clone());
            }
        }
    }

    for l in &found.loops {
        let key = *l as *const _;
        let over = var_name(&l.iter);
        let hit = is_content(&l.iter)
            || over.is_some_and(|name| parameters.get(&key).is_some_and(|p| p.contains(name)))
            || (over == Some("content") && !in_macros.contains(&key));
        if hit {
            return var_name(&l.target).map(|_| true).ok_or(Unknown);
        }
    }
    Ok(false)
}

/// The names that hold one message: targets of loops over the messages or over a
/// variable that was assigned from them.
fn message_names<'s>(found: &Found<'_, 's>) -> Result<Vec<&'s str>, Unknown> {
    let mut lists = vec!["messages"];
    let mut queue = VecDeque::from(["messages"]);
    while let Some(name) = queue.pop_front() {
        for (target, value) in &found.assigns {
            if is_access(value, name, None) {
                let assigned = var_name(target).ok_or(Unknown)?;
                lists.push(assigned);
                // vLLM guards only against a name assigned from itself; with a
                // cycle of two it would loop forever.
                if assigned != name {
                    if lists.len() > 1000 {
                        return Err(Unknown);
                    }
                    queue.push_back(assigned);
                }
            }
        }
    }
    let mut names = Vec::new();
    for l in &found.loops {
        if lists.iter().any(|name| is_access(&l.iter, name, None)) {
            names.push(var_name(&l.target).ok_or(Unknown)?);
        }
    }
    Ok(names)
}

fn var_name<'s>(e: &Expr<'s>) -> Option<&'s str> {
    match e {
        Expr::Var(v) => Some(v.id),
        _ => None,
    }
}

/// Returns whether e is the variable name, or its item key, seen through filters,
/// tests and slices.
fn is_access(e: &Expr, name: &str, key: Option<&str>) -> bool {
    charge(1);
    match (e, key) {
        (Expr::Filter(f), _) => f.expr.as_ref().is_some_and(|inner| is_access(inner, name, key)),
        (Expr::Test(t), _) => is_access(&t.expr, name, key),
        (Expr::Slice(s), _) => is_access(&s.expr, name, key),
        (Expr::GetAttr(a), Some(key)) => var_name(&a.expr) == Some(name) && a.name == key,
        (Expr::GetItem(i), Some(key)) => {
            var_name(&i.expr) == Some(name)
                && matches!(&i.subscript_expr, Expr::Const(c) if c.value == Value::from(key))
        }
        (e, None) => var_name(e) == Some(name),
        _ => false,
    }
}

fn statements<'t, 's>(list: &'t [Stmt<'s>], found: &mut Found<'t, 's>) {
    for s in list {
        statement(s, found);
    }
}

fn statement<'t, 's>(s: &'t Stmt<'s>, found: &mut Found<'t, 's>) {
    match s {
        Stmt::Template(t) => statements(&t.children, found),
        Stmt::EmitExpr(e) => expression(&e.expr, found),
        Stmt::ForLoop(l) => {
            found.loops.push(l);
            expression(&l.iter, found);
            statements(&l.body, found);
            statements(&l.else_body, found);
            l.filter_expr.iter().for_each(|e| expression(e, found));
        }
        Stmt::IfCond(c) => {
            expression(&c.expr, found);
            statements(&c.true_body, found);
            statements(&c.false_body, found);
        }
        Stmt::WithBlock(w) => {
            w.assignments.iter().for_each(|(_, e)| expression(e, found));
            statements(&w.body, found);
        }
        Stmt::Set(set) => {
            found.assigns.push((&set.target, &set.expr));
            expression(&set.expr, found);
        }
        Stmt::SetBlock(b) => {
            b.filter.iter().for_each(|e| expression(e, found));
            statements(&b.body, found);
        }
        Stmt::AutoEscape(b) => statements(&b.body, found),
        Stmt::FilterBlock(b) => {
            expression(&b.filter, found);
            statements(&b.body, found);
        }
        Stmt::Block(b) => statements(&b.body, found),
        Stmt::Macro(m) => {
            found.macros.push(m);
            m.defaults.iter().for_each(|e| expression(e, found));
            statements(&m.body, found);
        }
        Stmt::CallBlock(b) => {
            call(&b.call, found);
            statements(&b.macro_decl.body, found);
        }
        _ => {}
    }
}

fn expression<'t, 's>(e: &'t Expr<'s>, found: &mut Found<'t, 's>) {
    match e {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(s) => {
            expression(&s.expr, found);
            [&s.start, &s.stop, &s.step].into_iter().flatten().for_each(|e| expression(e, found));
        }
        Expr::UnaryOp(u) => expression(&u.expr, found),
        Expr::BinOp(b) => {
            expression(&b.left, found);
            expression(&b.right, found);
            found.operators.push(e);
        }
        Expr::Compare(c) => {
            expression(&c.expr, found);
            c.ops.iter().for_each(|op| expression(&op.expr, found));
        }
        Expr::IfExpr(c) => {
            expression(&c.test_expr, found);
            expression(&c.true_expr, found);
            c.false_expr.iter().for_each(|e| expression(e, found));
        }
        Expr::Filter(f) => {
            f.expr.iter().for_each(|e| expression(e, found));
            arguments(&f.args, found);
        }
        Expr::Test(t) => {
            expression(&t.expr, found);
            arguments(&t.args, found);
        }
        Expr::GetAttr(a) => expression(&a.expr, found),
        Expr::GetItem(i) => {
            expression(&i.expr, found);
            expression(&i.subscript_expr, found);
        }
        Expr::Call(c) => call(c, found),
        Expr::List(l) => l.items.iter().for_each(|e| expression(e, found)),
        Expr::Map(m) => m.keys.iter().chain(&m.values).for_each(|e| expression(e, found)),
    }
}

fn call<'t, 's>(c: &'t Call<'s>, found: &mut Found<'t, 's>) {
    found.calls.push(c);
    expression(&c.expr, found);
    arguments(&c.args, found);
}

fn arguments<'t, 's>(args: &'t [CallArg<'s>], found: &mut Found<'t, 's>) {
    for arg in args {
        match arg {
            CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => {
                expression(e, found)
            }
        }
    }
}
