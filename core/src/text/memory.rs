//! Shared memory of a workgroup as one list of named parts: its bytes in Rust, and a C++ struct.
//!
//! [`abi_memory!`](crate::abi_memory) takes the list. A part has a C++ type, optionally a count (`[number]`) or a
//! condition (`if condition`), written in the subset of [`functions`](crate::functions), and its size. The C++
//! struct has the parts as members, in the list's order, and no others; a kernel's entry asserts that its size
//! equals Rust's.
//!
//! ```
//! # use fmha_core::{abi_functions, abi_memory, abi_spec, memory::Size};
//! # abi_spec! {
//! #     /// How a kernel computes.
//! #     pub struct MyTile {
//! #         /// Buffers.
//! #         pub stages: i32,
//! #     }
//! # }
//! # abi_spec! {
//! #     /// Facts of a problem.
//! #     pub struct MySpec {
//! #         /// Whether it drops.
//! #         pub dropout: bool,
//! #     }
//! # }
//! abi_memory! {
//!     fn my_text() as SmemParts;
//!     /// Shared memory of a CTA.
//!     pub const fn smem_bytes(&self, spec: &MySpec) of tile: MyTile {
//!         /// Rows of Q.
//!         q: "QTile" => Size::tile(128 * 64 * 2);
//!         /// TMA's bytes of a block.
//!         full: "Barrier" [self.stages] => Size::BARRIER;
//!         keep: "float" if spec.dropout => Size::WORD;
//!     }
//! }
//! let tile = MyTile { stages: 2 };
//! assert_eq!(tile.smem_bytes(&MySpec { dropout: true }), 16 * 1024 + 1024);
//! assert!(my_text().contains("PartFull<PartQ<NoSmemParts, QTile>, Barrier, (tile.stages)>"));
//! ```

use crate::functions::{expression, pascal, round_up};

/// Bytes and alignment of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    bytes: i32,
    align: i32,
}

impl Size {
    /// Size of a barrier of 64 bits.
    pub const BARRIER: Self = Self::of(8, 8);

    /// Size of a word of 32 bits.
    pub const WORD: Self = Self::words(1);

    /// A part of `bytes` bytes, aligned to `align`.
    #[must_use]
    pub const fn of(bytes: i32, align: i32) -> Self {
        Self { bytes: round_up(bytes, align), align }
    }

    /// Size of `count` words of 32 bits.
    #[must_use]
    pub const fn words(count: i32) -> Self {
        Self::of(4 * count, 4)
    }

    /// Size of a swizzled tile, whose address and size are multiples of 1024 bytes.
    #[must_use]
    pub const fn tile(bytes: i32) -> Self {
        Self::of(bytes, 1024)
    }

    /// Size of a place that holds either of two parts: the larger size.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        if self.bytes < other.bytes { other } else { self }
    }

    /// End offset of `count` such parts that are placed after `end`.
    #[must_use]
    pub const fn behind(self, end: i32, count: i32) -> i32 {
        if count == 0 { end } else { round_up(end, self.align) + count * self.bytes }
    }
}

/// Declares a method that gives a workgroup's bytes, and a function that gives the struct's C++ definition.
#[macro_export]
macro_rules! abi_memory {
    ($text_vis:vis fn $text:ident() as $name:ident;
     $(#[$meta:meta])* $vis:vis const fn $bytes:ident(&$own:ident, $spec:ident : &$spec_type:ident)
        of $this:ident : $type:ident {
        $($(#[doc = $doc:literal])* $part:ident : $c_type:literal $([$count:expr])? $(if $when:expr)? => $size:expr;)*
    }) => {
        impl $type {
            $(#[$meta])*
            #[must_use]
            $vis const fn $bytes(&$own, $spec: &$spec_type) -> i32 {
                let mut end = 0;
                $(end = $crate::memory::Size::behind($size, end, 1 $(* $count)? $(* if $when { 1 } else { 0 })?);)*
                $crate::functions::round_up(end, 1024)
            }
        }

        $text_vis fn $text() -> String {
            let heading = concat!(
                "<", stringify!($spec_type $spec), ", ", stringify!($type $this), ">"
            );
            $crate::memory::definition((stringify!($name), heading), stringify!($this), &[$(
                $crate::memory::Part {
                    doc: &[$($doc),*],
                    name: stringify!($part),
                    c_type: $c_type,
                    count: $crate::abi_memory!(@text $(stringify!($count))?),
                    when: $crate::abi_memory!(@text $(stringify!($when))?),
                },
            )*])
        }
    };
    (@text) => { None };
    (@text $text:expr) => { Some($text) };
}

/// A part of the list as text from the Rust source.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub doc: &'a [&'a str],
    pub name: &'a str,
    pub c_type: &'a str,
    pub count: Option<&'a str>,
    pub when: Option<&'a str>,
}

/// C++ definition of the struct. Each part is a struct that derives from the one before, so an absent part takes no
/// room. Single inheritance is used, because with several bases NVRTC emits null checks of the object.
#[doc(hidden)]
#[must_use]
pub fn definition((name, heading): (&str, &str), own: &str, parts: &[Part<'_>]) -> String {
    let mut chain = format!("No{name}");
    let mut text = format!("struct {chain} {{}};\n");
    for part in parts {
        let (name, this) = (part.name, format!("Part{}", pascal(part.name)));
        let doc: String = part.doc.iter().map(|line| format!("//{line}\n")).collect();
        let absent = |value: &str| {
            format!("template <class Before, class T>\nstruct {this}<Before, T, {value}> : Before {{}};\n")
        };
        let (more, member, absent) = match (part.count, part.when) {
            (Some(_), _) => (", int count", format!("{name}[count]"), absent("0")),
            (None, Some(_)) => (", bool has", name.to_owned(), absent("false")),
            (None, None) => ("", name.to_owned(), String::new()),
        };
        text += &format!(
            "{doc}template <class Before, class T{more}>\nstruct {this} : Before {{\n  T {member};\n}};\n{absent}"
        );
        // Parentheses are needed: a comparison with `>` would end the template argument list.
        let argument = match (part.count, part.when) {
            (Some(count), Some(when)) => {
                format!(", ({} ? {} : 0)", expression(when, own), expression(count, own))
            }
            (Some(text), None) | (None, Some(text)) => format!(", ({})", expression(text, own)),
            (None, None) => String::new(),
        };
        chain = format!("{this}<{chain}, {}{argument}>", part.c_type);
    }
    text + &format!("template {heading}\nstruct {name} : {chain} {{}};\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_part_takes_no_room_and_others_are_aligned() {
        let size = Size::of(12, 16);
        assert_eq!(size.behind(5, 0), 5);
        assert_eq!(size.behind(5, 2), 16 + 32);
        assert_eq!(Size::BARRIER.behind(Size::WORD.behind(0, 3), 1), 24);
        assert_eq!(Size::tile(1).or(Size::tile(1025)), Size::tile(2000));
    }

    #[test]
    fn a_struct_has_the_parts_in_order() {
        let part =
            |name, count, when| Part { doc: &[" Why."], name, c_type: "Tile<spec, tile>", count, when };
        let parts = [part("q", None, None), part("raw_k", Some("self.stages"), Some("spec.dropout"))];
        let text = definition(("Parts", "<Spec spec, Tile tile>"), "tile", &parts);
        let ends = "template <Spec spec, Tile tile>\nstruct Parts : \
                    PartRawK<PartQ<NoParts, Tile<spec, tile>>, Tile<spec, tile>, (spec.dropout ? tile.stages : 0)> {};\n";
        assert!(text.ends_with(ends), "{text}");
        let part = "// Why.\ntemplate <class Before, class T, int count>\nstruct PartRawK : Before {\n  T raw_k[count];\n};\n";
        assert!(text.contains(part), "{text}");
        assert!(
            text.contains("template <class Before, class T>\nstruct PartRawK<Before, T, 0> : Before {};\n")
        );
    }
}
