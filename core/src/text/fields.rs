//! The fields of a compile-time struct by name: one list, from which they are parsed, printed, checked
//! and tuned.
//!
//! [`abi_spec!`](crate::abi_spec) makes the list. A field that a user may set lists its allowed values:
//!
//! ```
//! # use fmha_core::{abi_spec, fields::{Fields, Takes}};
//! abi_spec! {
//!     /// How a kernel computes.
//!     pub struct MyTile {
//!         /// Query rows of a block.
//!         pub block_m: i32 = Takes::among(&[64, 128]).tuned(),
//!         /// Buffers; with more than 4 nothing was ever gained.
//!         pub stages: i32 = Takes::within(1, 8).tuned_over(&[2, 3, 4]),
//!         /// Follows from the problem.
//!         pub wide: bool = Takes::nothing(),
//!     }
//! }
//! let mut tile = MyTile { block_m: 64, stages: 2, wide: true };
//! tile.set_field("stages", "3")?;
//! assert_eq!(tile.named_values()[1], ("stages", "3".to_owned()));
//! assert_eq!(tile.set_field("block_m", "96").unwrap_err(), "block_m=96 is not 64 or 128");
//! # Ok::<(), String>(())
//! ```

use std::fmt::Write as _;

/// A field's type, whose values have names.
pub trait FieldValue: Sized {
    /// Names of all values of a type with few values; empty for numbers.
    fn names() -> Vec<String>;

    /// The value that has this name.
    fn of_name(name: &str) -> Option<Self>;

    /// Name of the value.
    fn name(&self) -> String;
}

impl FieldValue for bool {
    fn names() -> Vec<String> {
        ["0", "1"].map(str::to_owned).to_vec()
    }

    fn of_name(name: &str) -> Option<Self> {
        match name {
            "1" | "true" => Some(true),
            "0" | "false" => Some(false),
            _ => None,
        }
    }

    fn name(&self) -> String {
        u8::from(*self).to_string()
    }
}

impl FieldValue for i32 {
    fn names() -> Vec<String> {
        Vec::new()
    }

    fn of_name(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    fn name(&self) -> String {
        self.to_string()
    }
}

/// Values that a user may set for a field, and values that tuning tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takes {
    range: Range,
    tries: Tries,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Range {
    /// Every value of the field's type.
    All,
    /// No value may be set: the field follows from the problem.
    Nothing,
    Among(&'static [i32]),
    Within {
        least: i32,
        most: i32,
        step: i32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tries {
    Nothing,
    All,
    These(&'static [i32]),
}

impl Takes {
    /// Allows every value of the field's type.
    #[must_use]
    pub const fn all() -> Self {
        Self { range: Range::All, tries: Tries::Nothing }
    }

    /// Allows no value: the field follows from the problem.
    #[must_use]
    pub const fn nothing() -> Self {
        Self { range: Range::Nothing, tries: Tries::Nothing }
    }

    /// Allows these numbers.
    #[must_use]
    pub const fn among(numbers: &'static [i32]) -> Self {
        Self { range: Range::Among(numbers), tries: Tries::Nothing }
    }

    /// Allows the numbers `least..=most`.
    #[must_use]
    pub const fn within(least: i32, most: i32) -> Self {
        Self::multiples(1, least, most)
    }

    /// Allows multiples of `step` in `least..=most`.
    #[must_use]
    pub const fn multiples(step: i32, least: i32, most: i32) -> Self {
        Self { range: Range::Within { least, most, step }, tries: Tries::Nothing }
    }

    /// Makes tuning try every allowed value.
    #[must_use]
    pub const fn tuned(self) -> Self {
        Self { tries: Tries::All, ..self }
    }

    /// Makes tuning try these numbers.
    #[must_use]
    pub const fn tuned_over(self, numbers: &'static [i32]) -> Self {
        Self { tries: Tries::These(numbers), ..self }
    }

    fn includes(&self, number: i32) -> bool {
        match self.range {
            Range::All => true,
            Range::Nothing => false,
            Range::Among(numbers) => numbers.contains(&number),
            Range::Within { least, most, step } => (least..=most).contains(&number) && number % step == 0,
        }
    }

    /// Text that describes the allowed values, such as `a multiple of 16 in 16..=256`.
    fn words(&self, names: &[String]) -> String {
        let listed = |names: &[String]| match names {
            [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            all => all.join(""),
        };
        match self.range {
            Range::Nothing => "for the user to set: it follows from the problem".to_owned(),
            Range::All if names.is_empty() => "a whole number".to_owned(),
            Range::All => listed(names),
            Range::Among(numbers) => listed(&numbers.iter().map(i32::to_string).collect::<Vec<_>>()),
            Range::Within { least, most, step: 1 } => format!("in {least}..={most}"),
            Range::Within { least, most, step } => format!("a multiple of {step} in {least}..={most}"),
        }
    }
}

/// A field of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name of the field, in Rust, in C++ and for the user.
    pub name: &'static str,
    /// The values that the field allows.
    pub takes: Takes,
    /// [`FieldValue::names`] of the field's type.
    pub value_names: fn() -> Vec<String>,
}

impl Field {
    /// The values that tuning tries, by name; empty if tuning leaves the field alone.
    #[must_use]
    pub fn tried(&self) -> Vec<String> {
        let numbers = |numbers: &[i32]| numbers.iter().map(i32::to_string).collect();
        match (self.takes.tries, self.takes.range) {
            (Tries::Nothing, _) => Vec::new(),
            (Tries::These(these), _) => numbers(these),
            (Tries::All, Range::Among(all)) => numbers(all),
            (Tries::All, Range::Within { least, most, .. }) => {
                (least..=most).filter(|&n| self.takes.includes(n)).map(|n| n.to_string()).collect()
            }
            (Tries::All, Range::All | Range::Nothing) => (self.value_names)(),
        }
    }

    /// A value from its name.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn parse<T: FieldValue>(&self, value: &str) -> Result<T, String> {
        let names = (self.value_names)();
        let wrong = || format!("{}={value} is not {}", self.name, self.takes.words(&names));
        let number_is_taken = || match value.parse() {
            Ok(number) => self.takes.includes(number),
            Err(_) => matches!(self.takes.range, Range::All),
        };
        if names.is_empty() && !number_is_taken() || self.takes.range == Range::Nothing {
            return Err(wrong());
        }
        T::of_name(value).ok_or_else(wrong)
    }
}

/// A struct of [`abi_spec!`](crate::abi_spec), by its fields' names.
pub trait Fields {
    /// Fields of the struct, in order.
    fn fields() -> &'static [Field];

    /// Name and value of every field, as text.
    fn named_values(&self) -> Vec<(&'static str, String)>;

    /// Sets one field from names.
    ///
    /// # Errors
    /// A text that names the field, the value and the allowed values, or that lists the existing fields.
    fn set_field(&mut self, name: &str, value: &str) -> Result<(), String>;
}

/// The error text for a field name that the struct does not have.
#[must_use]
pub fn no_such_field(name: &str, value: &str, fields: &[Field]) -> String {
    let mut text = format!("{name}={value}: there is no such field (known: ");
    let known = fields.iter().filter(|field| field.takes.range != Range::Nothing);
    for (at, field) in known.enumerate() {
        // Writing to a String does not fail.
        let _ = write!(text, "{}{}", if at > 0 { ", " } else { "" }, field.name);
    }
    text + ")"
}

/// The name in snake case: `one_by_one` for `OneByOne`.
#[must_use]
pub fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// The fields of a struct that tuning varies, each with the values to try.
#[must_use]
pub fn knobs<T: Fields>() -> Vec<(&'static str, Vec<String>)> {
    let knobs = T::fields().iter().map(|field| (field.name, field.tried()));
    knobs.filter(|(_, values)| !values.is_empty()).collect()
}

/// Tunable fields ([`knobs`]) of a struct, each with its value.
#[must_use]
pub fn knob_values<T: Fields>(values: &T) -> Vec<(String, String)> {
    let fields = T::fields().iter().zip(values.named_values());
    let knobs = fields.filter(|(field, _)| !field.tried().is_empty());
    knobs.map(|(_, (name, value))| (name.to_owned(), value)).collect()
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "the macros declare what a crate exports")]
mod tests {
    use super::*;
    use crate::layout::VLayout;
    use crate::{abi_enum, abi_spec};

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Order {
        Single,
        OneByOne,
    }

    abi_enum!(Order { Single, OneByOne });

    abi_spec! {
        /// A struct with a field of each kind.
        pub struct Tile {
            /// A field that takes one of three numbers.
            pub rows: i32 = Takes::among(&[64, 128, 192]).tuned(),
            /// A field that takes a range with steps.
            pub keys: i32 = Takes::multiples(16, 16, 64).tuned(),
            /// A field that takes a range of which tuning tries some values.
            pub stages: i32 = Takes::within(1, 8).tuned_over(&[2, 3]),
            /// A field whose values have names.
            pub order: Order = Takes::all().tuned(),
            /// A flag that tuning does not change.
            pub flag: bool,
            /// A field that takes any number.
            pub number: i32,
            /// A field whose value follows from the problem.
            pub layout: VLayout = Takes::nothing(),
        }
    }

    fn tile() -> Tile {
        let (rows, keys, stages, order) = (64, 16, 1, Order::Single);
        Tile { rows, keys, stages, order, flag: false, number: 0, layout: VLayout::RowMajor }
    }

    #[test]
    fn every_field_is_set_and_printed_by_the_same_name() {
        let mut tile = tile();
        for (name, value) in [
            ("rows", "192"),
            ("keys", "48"),
            ("stages", "8"),
            ("order", "one_by_one"),
            ("flag", "1"),
            ("number", "-7"),
        ] {
            tile.set_field(name, value).unwrap();
            assert!(tile.named_values().contains(&(name, value.to_owned())), "{name}");
        }
        let expected = Tile {
            rows: 192,
            keys: 48,
            stages: 8,
            order: Order::OneByOne,
            flag: true,
            number: -7,
            layout: VLayout::RowMajor,
        };
        assert_eq!(tile, expected);
        assert_eq!(tile.named_values().len(), Tile::fields().len());
    }

    #[test]
    fn a_wrong_value_is_refused_with_the_field_the_value_and_what_it_takes() {
        for (name, value, words) in [
            ("rows", "96", "rows=96 is not 64, 128 or 192"),
            ("keys", "40", "keys=40 is not a multiple of 16 in 16..=64"),
            ("keys", "80", "keys=80 is not a multiple of 16 in 16..=64"),
            ("stages", "0", "stages=0 is not in 1..=8"),
            ("stages", "many", "stages=many is not in 1..=8"),
            ("order", "Single", "order=Single is not single or one_by_one"),
            ("flag", "2", "flag=2 is not 0 or 1"),
            ("number", "1.5", "number=1.5 is not a whole number"),
            (
                "layout",
                "row_major",
                "layout=row_major is not for the user to set: it follows from the problem",
            ),
            ("row", "64", "row=64: there is no such field (known: rows, keys, stages, order, flag, number)"),
        ] {
            let mut changed = tile();
            assert_eq!(changed.set_field(name, value).unwrap_err(), words);
            assert_eq!(changed, tile());
        }
    }

    #[test]
    fn what_is_tuned_is_taken_as_before_and_what_is_not_is_never_tried() {
        let field = |takes| Field { name: "stages", takes, value_names: i32::names };
        let range = Takes::within(1, 4);
        for (takes, tried) in [
            (range, &[][..]),
            (range.tuned(), &["1", "2", "3", "4"][..]),
            (range.tuned_over(&[2, 3]), &["2", "3"]),
        ] {
            assert_eq!(field(takes).tried(), tried);
            assert_eq!(field(takes).parse("4"), Ok(4));
            assert_eq!(field(takes).parse::<i32>("5").unwrap_err(), "stages=5 is not in 1..=4");
        }
        let one = field(Takes::among(&[2]));
        assert_eq!(one.parse::<i32>("3").unwrap_err(), "stages=3 is not 2");
    }

    #[test]
    fn tuning_tries_what_each_field_says() {
        let text = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            knobs::<Tile>(),
            [
                ("rows", text(&["64", "128", "192"])),
                ("keys", text(&["16", "32", "48", "64"])),
                ("stages", text(&["2", "3"])),
                ("order", text(&["single", "one_by_one"])),
            ]
        );
        let names: Vec<_> = knob_values(&tile()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["rows", "keys", "stages", "order"]);
        assert_eq!(knob_values(&tile())[3].1, "single");
    }
}
