//! Rewrites of a template's text, for what minijinja cannot be told otherwise.

use minijinja::machinery::{tokenize, Token, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;

/// Returns the template with `generation` blocks as `with` blocks (the same text
/// and the same scope) and every operand of `~` passed through the filter
/// `string`, so that it joins what Python's str() gives.
pub fn rewrite(template: &str) -> String {
    join_as_python(&generation_as_with(template))
}

fn generation_as_with(template: &str) -> String {
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

fn join_as_python(template: &str) -> String {
    const FILTER: &str = "|string";
    let tokens: Result<Vec<_>, _> =
        tokenize(template, false, SyntaxConfig::default(), WhitespaceConfig::default()).collect();
    let Ok(tokens) = tokens else {
        return template.to_string(); // the parser will say what is wrong
    };
    let mut inserts: Vec<usize> = Vec::new();
    for (i, (token, _)) in tokens.iter().enumerate() {
        if !matches!(token, Token::Tilde) || i == 0 {
            continue;
        }
        inserts.push(tokens[i - 1].1.end_offset as usize);
        let end = operand_end(&tokens[i + 1..].iter().map(|t| &t.0).collect::<Vec<_>>());
        let next_is_tilde = matches!(tokens.get(i + 1 + end), Some((Token::Tilde, _)));
        if end > 0 && !next_is_tilde {
            inserts.push(tokens[i + end].1.end_offset as usize);
        }
    }
    let mut out = String::with_capacity(template.len() + inserts.len() * FILTER.len());
    let mut last = 0;
    for at in inserts {
        if at < last || !template.is_char_boundary(at) {
            return template.to_string();
        }
        out.push_str(&template[last..at]);
        out.push_str(FILTER);
        last = at;
    }
    out.push_str(&template[last..]);
    out
}

/// How many of the tokens make up the operand that they start with: a signed
/// primary expression with its attributes, subscripts, calls and filters.
fn operand_end(tokens: &[&Token]) -> usize {
    let mut i = 0;
    while matches!(tokens.get(i), Some(Token::Minus | Token::Plus)) {
        i += 1;
    }
    match tokens.get(i) {
        Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) => i = group_end(tokens, i),
        Some(Token::Ident(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_)) => i += 1,
        Some(Token::Str(_) | Token::String(_)) => {
            while matches!(tokens.get(i), Some(Token::Str(_) | Token::String(_))) {
                i += 1;
            }
        }
        _ => return 0,
    }
    loop {
        match tokens.get(i) {
            Some(Token::Dot | Token::Pipe) => i += 2,
            Some(Token::ParenOpen | Token::BracketOpen) => i = group_end(tokens, i),
            _ => return i.min(tokens.len()),
        }
    }
}

/// The index after the bracket that closes the one at index open.
fn group_end(tokens: &[&Token], open: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(open) {
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
