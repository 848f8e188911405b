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

/// A struct whose fields stand in two groups: those of `fixed`, and those of `set`, each of which has a setter of its
/// name and documentation. The setter of an `Option<T>` takes a `T` too.
macro_rules! with_setters {
    ($(#[$about:meta])* pub struct $name:ident<$life:lifetime> { $(fixed { $($fixed:tt)* })? set { $($set:tt)* } }) => {
        $(#[$about])*
        pub struct $name<$life> {
            $($($fixed)*)?
            $($set)*
        }

        impl<$life> $name<$life> {
            $crate::setters::setters_of! { $($set)* }
        }
    };
}
pub(crate) use with_setters;

/// The setters of a list of fields.
macro_rules! setters_of {
    () => {};
    ($(#[$doc:meta])* pub $name:ident: Option<$value:ty>, $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: impl Into<Option<$value>>) -> Self {
            self.$name = $name.into();
            self
        }
        $crate::setters::setters_of! { $($rest)* }
    };
    ($(#[$doc:meta])* pub $name:ident: $value:ty, $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $value) -> Self {
            self.$name = $name;
            self
        }
        $crate::setters::setters_of! { $($rest)* }
    };
}
pub(crate) use setters_of;
