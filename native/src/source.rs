//! Rewrites of a template's source, for behaviour that minijinja cannot be configured for.

use crate::filters::ITERATED;
use minijinja::machinery::{tokenize, Span, Token, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;

/// Returns the template with every operand of `~` passed through the filter
/// `string`, so that it joins the results of Python's str(), and every operand of a loop
/// through a filter that fails for values that Python cannot iterate.
pub fn as_python(template: &str) -> String {
    let tokens: Result<Vec<_>, _> =
        tokenize(template, false, SyntaxConfig::default(), WhitespaceConfig::default()).collect();
    let Ok(tokens) = tokens else {
        return template.to_string(); // the parser will say what is wrong
    };
    let mut inserts: Vec<(usize, String)> = Vec::new();
    filter_joined(&tokens, &mut inserts);
    filter_iterated(&tokens, &mut inserts);
    inserts.sort_by_key(|(at, _)| *at);
    let mut out = String::with_capacity(template.len() + 16 * inserts.len());
    let mut last = 0;
    for (at, text) in inserts {
        let Some(piece) = template.get(last..at) else {
            return template.to_string();
        };
        out.push_str(piece);
        out.push_str(&text);
        last = at;
    }
    out.push_str(&template[last..]);
    out
}

/// Returns the template with its `generation` blocks as `with` blocks: the same
/// text and the same scope.
pub fn generation_as_with(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at + 2]);
        rest = &rest[at + 2..];
        let word_at = rest.find(|c: char| !(c == '-' || c == '+' || c.is_whitespace())).unwrap_or(rest.len());
        let word_end = rest[word_at..]
            .find(|c: char| !(c.is_alphanumeric() || c == '_'))
            .map_or(rest.len(), |n| word_at + n);
        let replacement = match &rest[word_at..word_end] {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&rest[..word_at]);
        out.push_str(replacement);
        rest = &rest[word_end..];
    }
    out.push_str(rest);
    out
}

fn filter_joined(tokens: &[(Token, Span)], inserts: &mut Vec<(usize, String)>) {
    for (i, (token, _)) in tokens.iter().enumerate() {
        if !matches!(token, Token::Tilde) || i == 0 {
            continue;
        }
        let start = operand_start(&tokens[..i]);
        let arithmetic = start > 0
            && matches!(tokens[start - 1].0, Token::Mul | Token::Div | Token::FloorDiv | Token::Mod | Token::Pow);
        if !arithmetic {
            // After `2 * 3` the filter would apply to the 3 alone.
            inserts.push((tokens[i - 1].1.end_offset as usize, "|string".to_string()));
        }
        let end = operand_end(&tokens[i + 1..]);
        let next_is_tilde = matches!(tokens.get(i + 1 + end), Some((Token::Tilde, _)));
        if end > 0 && !next_is_tilde {
            inserts.push((tokens[i + end].1.end_offset as usize, "|string".to_string()));
        }
    }
}

fn filter_iterated(tokens: &[(Token, Span)], inserts: &mut Vec<(usize, String)>) {
    for i in 1..tokens.len() {
        if !matches!((&tokens[i - 1].0, &tokens[i].0), (Token::BlockStart, Token::Ident("for"))) {
            continue;
        }
        let is_in = |t: &(Token, Span)| matches!(t.0, Token::Ident("in"));
        let Some(start) = tokens[i..].iter().position(is_in).map(|n| i + n + 1) else {
            return;
        };
        let mut depth = 0;
        let mut end = start;
        while let Some((token, _)) = tokens.get(end) {
            match token {
                Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth += 1,
                Token::ParenClose | Token::BracketClose | Token::BraceClose => depth -= 1,
                Token::Ident("if" | "recursive") | Token::BlockEnd if depth == 0 => break,
                _ => {}
            }
            end += 1;
        }
        if end > start {
            inserts.push((tokens[start].1.start_offset as usize, "(".to_string()));
            inserts.push((tokens[end - 1].1.end_offset as usize, format!(")|{ITERATED}")));
        }
    }
}

/// The index of the token that begins the operand which ends the tokens.
fn operand_start(tokens: &[(Token, Span)]) -> usize {
    const KEYWORDS: [&str; 10] = ["and", "elif", "else", "if", "in", "is", "not", "or", "recursive", "set"];
    let mut i = tokens.len();
    while i > 0 {
        if matches!(tokens[i - 1].0, Token::ParenClose | Token::BracketClose | Token::BraceClose) {
            i = group_start(tokens, i - 1);
            match i.checked_sub(1).map(|before| &tokens[before].0) {
                Some(Token::Ident(name)) if !KEYWORDS.contains(name) => continue,
                Some(Token::ParenClose | Token::BracketClose | Token::Str(_) | Token::String(_)) => continue,
                _ => return i,
            }
        }
        i -= 1;
        match i.checked_sub(1).map(|before| &tokens[before].0) {
            Some(Token::Dot | Token::Pipe) => i -= 1,
            _ => return i,
        }
    }
    i
}

/// The index of the bracket that the one at index close closes.
fn group_start(tokens: &[(Token, Span)], close: usize) -> usize {
    let mut depth = 0;
    for i in (0..=close).rev() {
        match tokens[i].0 {
            Token::ParenClose | Token::BracketClose | Token::BraceClose => depth += 1,
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => {
                depth -= 1;
                if depth == 0 {
                    return i;
                }
            }
            _ => {}
        }
    }
    0
}

/// The number of tokens of the operand at the start: a signed primary expression with
/// its attributes, subscripts, calls and filters.
fn operand_end(tokens: &[(Token, Span)]) -> usize {
    let mut i = 0;
    while matches!(tokens.get(i).map(|t| &t.0), Some(Token::Minus | Token::Plus)) {
        i += 1;
    }
    match tokens.get(i).map(|t| &t.0) {
        Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => i = group_end(tokens, i),
        Some(Token::Ident(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_)) => i += 1,
        Some(Token::Str(_) | Token::String(_)) => {
            while matches!(tokens.get(i).map(|t| &t.0), Some(Token::Str(_) | Token::String(_))) {
                i += 1;
            }
        }
        _ => return 0,
    }
    loop {
        match tokens.get(i).map(|t| &t.0) {
            Some(Token::Dot | Token::Pipe) => i += 2,
            Some(Token::ParenOpen | Token::BracketOpen) => i = group_end(tokens, i),
            _ => return i.min(tokens.len()),
        }
    }
}

/// The index after the bracket that closes the one at index open.
fn group_end(tokens: &[(Token, Span)], open: usize) -> usize {
    let mut depth = 0;
    for (i, (token, _)) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}
