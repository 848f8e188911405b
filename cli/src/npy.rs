//! The `.npy` format, versions 1 to 3 (NumPy Enhancement Proposal 1): a magic word, a Python dict
//! as text, the elements.
//!
//! Read here rather than by a crate: `npyz` 0.9.1 trusts the file for the sizes that it allocates and
//! multiplies, so that a damaged one panics.

use fmha::DType;

use crate::files::Tensor;

const MAGIC: &[u8] = b"\x93NUMPY";

/// The tensor in the bytes of a file.
pub(super) fn decode(mut file: Vec<u8>) -> Result<Tensor, String> {
    let damaged = || format!("no .npy file: its {} bytes do not begin with a header", file.len());
    let rest = file.strip_prefix(MAGIC).ok_or_else(damaged)?;
    let (version, rest) = rest.split_first_chunk::<2>().ok_or_else(damaged)?;
    let (length, rest) = match version {
        [1, 0] => rest.split_first_chunk::<2>().map(|(n, rest)| (u32::from(u16::from_le_bytes(*n)), rest)),
        [2 | 3, 0] => rest.split_first_chunk::<4>().map(|(n, rest)| (u32::from_le_bytes(*n), rest)),
        [major, minor] => return Err(format!(".npy version {major}.{minor} is not 1.0, 2.0 or 3.0")),
    }
    .ok_or_else(damaged)?;
    let (header, data) = rest.split_at_checked(length as usize).ok_or_else(damaged)?;
    let header = std::str::from_utf8(header).map_err(|_| damaged())?;

    let dtype = match entry(header, "descr").and_then(quoted).ok_or("its header has no plain descr")? {
        "<f4" => DType::F32,
        "<f2" => DType::F16,
        "<f8" => return Err("dtype f64 (<f8) is not taken: convert it, `a.astype(numpy.float32)`".into()),
        other => return Err(format!("dtype {other} is neither f32 (<f4) nor f16 (<f2)")),
    };
    let shape = entry(header, "shape").and_then(tuple).ok_or("its header has no shape")?;
    let fortran = entry(header, "fortran_order").ok_or("its header has no fortran_order")?;
    if fortran.starts_with("True") && shape.len() > 1 {
        return Err("its order is Fortran's (column-major): save `numpy.ascontiguousarray(a)`".into());
    }
    let expected = shape.iter().try_fold(dtype.size_bytes(), |product, &extent| product.checked_mul(extent));
    if expected != Some(data.len() as u64) {
        let expected = expected.map_or("more than 2^64".to_owned(), |expected| expected.to_string());
        return Err(format!(
            "shape {shape:?} of {dtype} needs {expected} bytes, but {} follow the header",
            data.len()
        ));
    }
    let header_bytes = file.len() - data.len();
    file.drain(..header_bytes);
    Ok(Tensor { dtype, shape, bytes: file })
}

/// The header of a tensor, to be followed by its bytes; `None` for a type that the format lacks.
pub(super) fn header(tensor: &Tensor) -> Option<Vec<u8>> {
    let descr = match tensor.dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        _ => return None,
    };
    let extents: String = tensor.shape.iter().map(|extent| format!("{extent},")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({extents}), }}");
    // Version 1.0 has a u16 length, which rank 4 cannot exceed; data starts at a multiple of 64.
    let fixed = MAGIC.len() + 4;
    let length = (fixed + dict.len() + 1).next_multiple_of(64) - fixed;
    let mut bytes = [MAGIC, &[1, 0], &(length as u16).to_le_bytes()].concat();
    bytes.extend_from_slice(format!("{dict:<width$}\n", width = length - 1).as_bytes());
    Some(bytes)
}

/// What follows `'key':` in the dict.
fn entry<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let mut quotes = [format!("'{key}'"), format!("\"{key}\"")].into_iter();
    let after = quotes.find_map(|quoted| header.split_once(&quoted).map(|(_, after)| after))?;
    after.trim_start().strip_prefix(':').map(str::trim_start)
}

fn quoted(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
    text[1..].split_once(quote).map(|(inside, _)| inside)
}

fn tuple(text: &str) -> Option<Vec<u64>> {
    let inside = text.strip_prefix('(')?.split_once(')')?.0;
    inside
        .split(',')
        .map(str::trim)
        .filter(|extent| !extent.is_empty())
        .map(|extent| extent.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dict: &str, data: &[u8]) -> Vec<u8> {
        [MAGIC, &[1, 0], &(dict.len() as u16).to_le_bytes(), dict.as_bytes(), data].concat()
    }

    #[test]
    fn what_numpy_writes_is_read() {
        // The header that numpy 2.4 writes for numpy.zeros((1, 2), "float16").
        let dict = "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }                \n";
        let tensor = decode(file(dict, &[0, 60, 0, 64])).unwrap();
        assert_eq!((tensor.dtype, tensor.shape.as_slice()), (DType::F16, &[1, 2][..]));
        assert_eq!(tensor.values().collect::<Vec<_>>(), [1.0, 2.0]);
    }

    #[test]
    fn our_header_reads_back_and_aligns_the_data() {
        for shape in [vec![], vec![3], vec![1, 2, 3, 4]] {
            let elems: u64 = shape.iter().product();
            let tensor = Tensor { dtype: DType::F32, shape, bytes: vec![7; 4 * elems as usize] };
            let mut bytes = header(&tensor).unwrap();
            assert_eq!(bytes.len() % 64, 0);
            bytes.extend_from_slice(&tensor.bytes);
            assert_eq!(decode(bytes), Ok(tensor));
        }
    }

    #[test]
    fn a_damaged_file_is_refused_wherever_the_damage_is() {
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", &[0; 8]);
        assert!(decode(whole.clone()).is_ok());
        for length in 0..whole.len() {
            assert!(decode(whole[..length].to_vec()).is_err(), "{length} bytes");
        }
        for at in 0..whole.len() - 8 {
            for byte in [0, b' ', b'9', 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = byte;
                // Blanks hurt nothing; what is accepted still has the size it claims.
                if let Ok(tensor) = decode(damaged) {
                    assert_eq!(tensor.bytes.len(), 8);
                }
            }
        }
        for dict in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
            "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }",
            "{'descr': '>f4', 'fortran_order': False, 'shape': (2, 1), }",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 1), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 1), }",
        ] {
            assert!(decode(file(dict, &[0; 8])).is_err(), "{dict}");
        }
    }
}
