//! Rewrites of a template's source, for behavior that minijinja cannot be configured to
//! have.

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
