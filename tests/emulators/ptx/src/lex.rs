//! Splits PTX text into tokens. Comments vanish; every token remembers its line.

use crate::fault::Fault;

/// One token of PTX text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    /// Identifier, register, directive or dotted opcode (`mad.lo.s32`, `%tid.x`, `.reg`).
    Word(String),
    /// Integer literal, as its 64-bit pattern.
    Int(u64),
    /// `0f…` or a decimal with a point: single precision pattern and its double value.
    Float(f64),
    /// `0f…`: exact single precision pattern.
    F32(u32),
    /// `0d…`: exact double precision pattern.
    F64(u64),
    /// A quoted string, without its quotes.
    Text(String),
    /// Any other single character.
    Punct(char),
}

/// A token and the line (from 1) it stands on.
#[derive(Clone, Debug)]
pub(crate) struct Spanned {
    pub(crate) token: Token,
    pub(crate) line: u32,
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'.')
}

/// Splits `text` into tokens.
pub(crate) fn lex(text: &str) -> Result<Vec<Spanned>, Fault> {
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1);
    let mut out = Vec::with_capacity(bytes.len() / 4);
    while at < bytes.len() {
        let c = bytes[at];
        let rest = &bytes[at..];
        if c == b'\n' {
            line += 1;
            at += 1;
        } else if c.is_ascii_whitespace() || c == 0 {
            at += 1;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|&c| c == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let len = text[at..].find("*/").map_or(rest.len(), |n| n + 2);
            line += rest[..len].iter().filter(|&&c| c == b'\n').count() as u32;
            at += len;
        } else if c == b'"' {
            let len = rest[1..].iter().position(|&c| c == b'"').unwrap_or(rest.len() - 1);
            out.push(Spanned { token: Token::Text(text[at + 1..at + 1 + len].to_string()), line });
            at += len + 2;
        } else if is_word_start(c) {
            let len = word_length(rest);
            out.push(Spanned { token: Token::Word(text[at..at + len].to_string()), line });
            at += len;
        } else if c.is_ascii_digit() {
            let len =
                rest.iter().position(|&c| !(c.is_ascii_alphanumeric() || c == b'.')).unwrap_or(rest.len());
            out.push(Spanned { token: number(&text[at..at + len], line)?, line });
            at += len;
        } else {
            out.push(Spanned { token: Token::Punct(c as char), line });
            at += 1;
        }
    }
    Ok(out)
}

/// A word takes `::` with it when more of the word follows (`shared::cta`), never a lone `:` (a label).
fn word_length(rest: &[u8]) -> usize {
    let mut len = 1;
    while len < rest.len() {
        if is_word(rest[len]) {
            len += 1;
        } else if rest[len..].starts_with(b"::")
            && rest.get(len + 2).is_some_and(|&c| is_word_start(c) || is_word(c))
        {
            len += 2;
        } else {
            break;
        }
    }
    len
}

fn number(text: &str, line: u32) -> Result<Token, Fault> {
    let bad = || Fault::syntax(line, format!("`{text}` is no number"));
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches('u');
    if let Some(hex) = lower.strip_prefix("0f").filter(|h| h.len() == 8) {
        return u32::from_str_radix(hex, 16).map(Token::F32).map_err(|_| bad());
    }
    if let Some(hex) = lower.strip_prefix("0d").filter(|h| h.len() == 16) {
        return u64::from_str_radix(hex, 16).map(Token::F64).map_err(|_| bad());
    }
    let int = if let Some(hex) = digits.strip_prefix("0x") {
        u64::from_str_radix(hex, 16)
    } else if let Some(bin) = digits.strip_prefix("0b") {
        u64::from_str_radix(bin, 2)
    } else if digits.contains('.') || (digits.contains('e') && !digits.starts_with('0')) {
        return digits.parse().map(Token::Float).map_err(|_| bad());
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(digits, 8)
    } else {
        digits.parse()
    };
    int.map(Token::Int).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_qualifier_belongs_to_its_word_and_a_label_colon_does_not() {
        let tokens: Vec<_> = lex("L1:\n mbarrier.init.shared::cta.b64 [%r1], 0f3F800000; // x").unwrap();
        let words: Vec<_> = tokens.iter().map(|t| &t.token).collect();
        assert_eq!(words[0], &Token::Word("L1".into()));
        assert_eq!(words[1], &Token::Punct(':'));
        assert_eq!(words[2], &Token::Word("mbarrier.init.shared::cta.b64".into()));
        assert_eq!(words[7], &Token::F32(0x3f80_0000));
        assert_eq!(tokens[2].line, 2);
    }
}
