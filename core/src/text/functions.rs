//! Derived numbers that host and device share: functions written once in Rust, and rendered to C++.
//!
//! [`abi_functions!`](crate::abi_functions) takes functions of a small subset: `let`, `if`, `match` and `matches!`
//! over enums, arithmetic, comparisons, fields, calls. A method becomes a C++ function whose last argument is
//! `self`, under the name that the macro gives; `as i32` is dropped, and a constant `MOST_ROWS` becomes
//! `kMostRows`.
//!
//! ```
//! # use fmha_core::{abi_functions, abi_spec};
//! abi_spec! {
//!     /// How a kernel computes.
//!     pub struct MyTile {
//!         /// Warps that consume.
//!         pub warps: i32,
//!         /// Whether one more loads.
//!         pub loads: bool,
//!     }
//! }
//! abi_functions! {
//!     fn my_text() of tile: MyTile {
//!         /// Threads of a CTA.
//!         pub const fn num_threads(&self) -> i32 {
//!             32 * (self.warps + if self.loads { 1 } else { 0 })
//!         }
//!     }
//! }
//! assert_eq!(MyTile { warps: 4, loads: true }.num_threads(), 160);
//! assert_eq!(
//!     my_text(),
//!     "FMHA_DEVICE constexpr int32_t num_threads(const MyTile& tile) {\n  \
//!      return 32 * (tile.warps + (tile.loads ? 1 : 0));\n}\n"
//! );
//! ```

/// Declares functions in Rust, and a function that returns their C++ definitions. They are methods of a spec, or
/// free functions.
#[macro_export]
macro_rules! abi_functions {
    ($(#[$list_meta:meta])* $list_vis:vis fn $list:ident() of $this:ident : $type:ident {
        $($(#[$meta:meta])* $vis:vis const fn $name:ident(&$own:ident $(, $arg:ident : $arg_type:ty)*) -> $out:ty
            { $($body:tt)* })*
    }) => {
        impl $type {
            $($(#[$meta])* #[must_use] $vis const fn $name(&$own $(, $arg : $arg_type)*) -> $out { $($body)* })*
        }

        $(#[$list_meta])*
        $list_vis fn $list() -> String {
            [$($crate::functions::definition(
                stringify!($name),
                &[$((stringify!($arg), stringify!($arg_type)),)* (stringify!($this), concat!("&", stringify!($type)))],
                stringify!($out),
                stringify!($($body)*),
            ),)*].concat()
        }
    };
    ($(#[$list_meta:meta])* $list_vis:vis fn $list:ident() {
        $($(#[$meta:meta])* $vis:vis const fn $name:ident($($arg:ident : $arg_type:ty),*) -> $out:ty
            { $($body:tt)* })*
    }) => {
        $($(#[$meta])* #[must_use] $vis const fn $name($($arg : $arg_type),*) -> $out { $($body)* })*

        $(#[$list_meta])*
        $list_vis fn $list() -> String {
            [$($crate::functions::definition(
                stringify!($name),
                &[$((stringify!($arg), stringify!($arg_type)),)*],
                stringify!($out),
                stringify!($($body)*),
            ),)*].concat()
        }
    };
}

/// Rounds `a` up to a multiple of `b`; `fmha/portable.h` has an equal function.
#[must_use]
pub const fn round_up(a: i32, b: i32) -> i32 {
    (a + b - 1) / b * b
}

/// The larger of two numbers; `fmha/portable.h` has an equal function.
#[must_use]
pub const fn max(a: i32, b: i32) -> i32 {
    if a < b { b } else { a }
}

/// C++ definition of a function. `args` have names and Rust's types.
///
/// # Panics
/// On syntax outside the subset; tests render every function of a crate.
#[doc(hidden)]
#[must_use]
pub fn definition(name: &str, args: &[(&str, &str)], out: &str, body: &str) -> String {
    let args: Vec<String> = args.iter().map(|(name, ty)| format!("{} {name}", c_type(ty))).collect();
    let own = args.last().and_then(|arg| arg.rsplit(' ').next()).unwrap_or_default();
    let tokens = tokens(body);
    let mut reader = Reader { tokens: &tokens, at: 0, own };
    let body = reader.block();
    format!("FMHA_DEVICE constexpr {} {name}({}) {{\n{body}}}\n", c_type(out), args.join(", "))
}

/// C++ text of an expression of the subset; `own` replaces `self`.
#[must_use]
pub(crate) fn expression(text: &str, own: &str) -> String {
    let tokens = tokens(text);
    Reader { tokens: &tokens, at: 0, own }.value(&[])
}

fn c_type(ty: &str) -> String {
    let ty = ty.replace(' ', "");
    match ty.strip_prefix('&') {
        Some(referred) => format!("const {referred}&"),
        None if ty == "i32" => "int32_t".to_owned(),
        None => ty,
    }
}

/// Words, numbers and signs of a text.
fn tokens(text: &str) -> Vec<String> {
    const PAIRS: [&str; 9] = ["::", "=>", "==", "!=", "<=", ">=", "&&", "||", "->"];
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let length = if is_word(first) {
            rest.find(|c| !is_word(c)).unwrap_or(rest.len())
        } else {
            PAIRS.iter().find(|pair| rest.starts_with(**pair)).map_or(first.len_utf8(), |pair| pair.len())
        };
        tokens.push(rest[..length].to_owned());
        rest = rest[length..].trim_start();
    }
    tokens
}

/// Translates the tokens of a function body to C++.
struct Reader<'a> {
    tokens: &'a [String],
    at: usize,
    /// The name that replaces `self`.
    own: &'a str,
}

impl Reader<'_> {
    fn peek(&self) -> &str {
        self.tokens.get(self.at).map_or("", String::as_str)
    }

    fn next(&mut self) -> String {
        self.at += 1;
        self.tokens[self.at - 1].clone()
    }

    fn expect(&mut self, token: &str) {
        assert_eq!(self.peek(), token, "in {}", self.tokens.join(" "));
        self.at += 1;
    }

    /// Translates the statements of a block, and the value after them.
    fn block(&mut self) -> String {
        let mut text = String::new();
        while self.peek() == "let" {
            self.at += 1;
            let name = self.next();
            self.expect("=");
            text += &format!("  const auto {name} = {};\n", self.value(&[";"]));
            self.expect(";");
        }
        let value = self.value(&["}"]);
        text + &format!("  return {value};\n")
    }

    /// Translates an expression up to one of these tokens, which is not consumed.
    fn value(&mut self, ends: &[&str]) -> String {
        let mut text = String::new();
        while !self.peek().is_empty() && !ends.contains(&self.peek()) {
            let token = self.next();
            match token.as_str() {
                "if" => text += &format!("({})", self.choice()),
                "match" => text += &format!("({})", self.cases()),
                "matches" => text += &format!("({})", self.is_among()),
                "as" => drop(self.next()),
                "(" => {
                    text += &format!("({})", self.value(&[")"]));
                    self.expect(")");
                }
                // A borrow `&` is dropped: C++ takes the argument by reference.
                "&" => {}
                "!" => text += "!",
                "," => text = text.trim_end().to_owned() + ", ",
                "-" | "+" | "*" | "/" | "%" | "<" | ">" | "==" | "!=" | "<=" | ">=" | "&&" | "||" => {
                    text += &format!(" {token} ");
                }
                word => text += &self.path(word),
            }
        }
        text.trim().to_owned()
    }

    /// Translates `a.b.c`, `A::B`, `f(x)`, `a.b.f(x)`, a constant or a number.
    fn path(&mut self, first: &str) -> String {
        let is_constant = first.len() > 1 && first.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let mut path = match first {
            "self" => self.own.to_owned(),
            _ if is_constant => format!("k{}", pascal(first)),
            _ => first.to_owned(),
        };
        loop {
            match self.peek() {
                "::" => {
                    self.at += 1;
                    path += &format!("::{}", self.next());
                }
                "." => {
                    self.at += 1;
                    let member = self.next();
                    if self.peek() == "(" {
                        let args = self.arguments();
                        let comma = if args.is_empty() { "" } else { ", " };
                        path = format!("{member}({args}{comma}{path})");
                    } else {
                        path += &format!(".{member}");
                    }
                }
                "(" => path = format!("{path}({})", self.arguments()),
                _ => return path,
            }
        }
    }

    fn arguments(&mut self) -> String {
        self.expect("(");
        let args = self.value(&[")"]);
        self.expect(")");
        args.trim_end_matches(", ").trim_end_matches(',').to_owned()
    }

    fn braced(&mut self) -> String {
        self.expect("{");
        let value = self.value(&["}"]);
        self.expect("}");
        value
    }

    /// Translates what follows `if` to `condition ? one : other`.
    fn choice(&mut self) -> String {
        let condition = self.value(&["{"]);
        let one = self.braced();
        self.expect("else");
        let other = if self.peek() == "if" {
            self.at += 1;
            self.choice()
        } else {
            self.braced()
        };
        format!("{condition} ? {one} : {other}")
    }

    /// Translates what follows `match`; the last arm becomes the default case.
    fn cases(&mut self) -> String {
        let of = self.value(&["{"]);
        self.expect("{");
        let mut text = String::new();
        loop {
            let patterns = self.patterns("=>");
            self.expect("=>");
            let value = self.value(&[",", "}"]);
            if self.peek() == "," {
                self.at += 1;
            }
            if self.peek() == "}" {
                self.at += 1;
                return text + &value;
            }
            text += &format!("{} ? {value} : ", any_of(&of, &patterns));
        }
    }

    /// Translates what follows `matches`: `!(value, patterns)`.
    fn is_among(&mut self) -> String {
        self.expect("!");
        self.expect("(");
        let of = self.value(&[","]);
        self.expect(",");
        let patterns = self.patterns(")");
        self.expect(")");
        any_of(&of, &patterns)
    }

    fn patterns(&mut self, end: &str) -> Vec<String> {
        let mut patterns = Vec::new();
        loop {
            let first = self.next();
            patterns.push(self.path(&first));
            if self.peek() != "|" {
                assert_eq!(self.peek(), end, "in {}", self.tokens.join(" "));
                return patterns;
            }
            self.at += 1;
        }
    }
}

fn any_of(of: &str, patterns: &[String]) -> String {
    patterns.iter().map(|pattern| format!("{of} == {pattern}")).collect::<Vec<_>>().join(" || ")
}

/// The name in Pascal case: `MostRows` for `MOST_ROWS` or `most_rows`.
pub(crate) fn pascal(name: &str) -> String {
    let part = |word: &str| word[..1].to_uppercase() + &word[1..].to_lowercase();
    name.split('_').filter(|word| !word.is_empty()).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(args: &[(&str, &str)], text: &str) -> String {
        let text = definition("f", args, "i32", text);
        let begin = text.find("{\n").unwrap() + 2;
        text[begin..text.len() - 2].trim().replace("\n  ", " ")
    }

    #[test]
    fn the_subset_is_rendered_with_its_values() {
        let own: &[(&str, &str)] = &[("spec", "& FwdSpec"), ("tile", "& Tile")];
        for (rust, cpp) in [
            ("self.rows * 2", "return tile.rows * 2;"),
            (
                "if self.tma && !spec.dropout { 1 } else if a < b { 2 } else { 3 }",
                "return (tile.tma && !spec.dropout ? 1 : a < b ? 2 : 3);",
            ),
            (
                "let x = self.rows(spec); x + LEAST_ROWS",
                "const auto x = rows(spec, tile); return x + kLeastRows;",
            ),
            ("32 / spec.dtype.size_bytes() as i32", "return 32 / size_bytes(spec.dtype);"),
            (
                "matches!(self.sums, Sums::Dk | Sums::Dv)",
                "return (tile.sums == Sums::Dk || tile.sums == Sums::Dv);",
            ),
            (
                "match self.order { Order::One | Order::Two => 1, Order::Three => f(2, 3) }",
                "return (tile.order == Order::One || tile.order == Order::Two ? 1 : f(2, 3));",
            ),
            ("(1 + round_up(spec.fwd.dim, 16)) / 2", "return (1 + round_up(spec.fwd.dim, 16)) / 2;"),
        ] {
            assert_eq!(body(own, rust), cpp);
        }
        let text = definition("f", own, "bool", "true");
        assert_eq!(
            text,
            "FMHA_DEVICE constexpr bool f(const FwdSpec& spec, const Tile& tile) {\n  return true;\n}\n"
        );
    }
}
