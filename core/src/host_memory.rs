//! Host memory whose allocation may fail.

use crate::error::{Error, Result};

/// An empty vector with room for `count` elements.
///
/// # Errors
/// [`Error::System`] with the size, if the system has too little memory.
pub fn reserve<T>(count: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    vec.try_reserve_exact(count).map_err(|_| no_memory(bytes))?;
    Ok(vec)
}

/// A vector with `count` copies of a value.
///
/// # Errors
/// [`Error::System`] with the size, if the system has too little memory.
pub fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    let mut all = reserve(count)?;
    all.resize(count, value);
    Ok(all)
}

/// The error for memory of this size that the system refused.
#[must_use]
pub fn no_memory(bytes: u64) -> Error {
    Error::System { what: format!("{bytes} bytes of host memory"), text: "the system has not so much".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_refused_is_an_error_with_its_size() {
        let error = reserve::<u64>(usize::MAX / 8).unwrap_err().to_string();
        assert!(error.contains("18446744073709551608 bytes of host memory"), "{error}");
        assert!(filled(usize::MAX, 0u16).is_err());
        assert_eq!(filled(3, 7).ok(), Some(vec![7, 7, 7]));
    }
}
