//! Setters that take and return the struct, so that a struct with non-exhaustive fields is still built in one
//! expression.

/// Turns each entry `/// what it is` `name: Type => place.of.field` into a method that sets the field and returns the
/// struct. A field that is an `Option` takes `impl Into<Option<T>>`: a `T`, or an `Option` of it.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $value:ty => $($place:ident).+;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $value) -> Self {
            self.$($place).+ = $name.into();
            self
        }
    )*};
}
pub(crate) use setters;
