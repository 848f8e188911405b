//! The `.npy` format, versions 1 to 3 (NumPy Enhancement Proposal 1): a magic word, a Python dict
//! as text, the elements.
//!
//! Read here rather than by a crate: `npyz` 0.9.1 trusts the file for the sizes that it allocates and
//! multiplies, so that a damaged one panics.

use std::fmt;

use fmha::DType;

use crate::files::Tensor;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Decodes the tensor in a file's bytes, in C order even if the file's order differs. `raw` is the user's type for
/// elements that the file calls raw bytes (`V2`), because the format lacks their type.
pub(super) fn decode(file: Vec<u8>, raw: Option<DType>) -> Result<Tensor, String> {
    let (dtype, shape, bytes) =
        decode_as(file, |descr| dtype(descr, raw).map(|dtype| (dtype, dtype.size_bytes())))?;
    Ok(Tensor { dtype, shape, bytes })
}

/// Element type of a mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MaskElem {
    I32,
    U32,
    Bool,
}

impl fmt::Display for MaskElem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MaskElem::I32 => "i32",
            MaskElem::U32 => "u32",
            MaskElem::Bool => "bool",
        })
    }
}

/// A mask in memory: row-major, little-endian.
pub(super) struct Mask {
    pub(super) elem: MaskElem,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

/// The mask in the bytes of a file: i32, u32 or bool.
pub(super) fn decode_mask(file: Vec<u8>) -> Result<Mask, String> {
    let elem = |descr: &str| match descr {
        "<i4" => Ok((MaskElem::I32, 4)),
        "<u4" => Ok((MaskElem::U32, 4)),
        "|b1" => Ok((MaskElem::Bool, 1)),
        other => Err(format!("dtype {other} is not i32 (<i4), u32 (<u4) or bool (|b1)")),
    };
    let (elem, shape, bytes) = decode_as(file, elem)?;
    Ok(Mask { elem, shape, bytes })
}

/// Shape and elements of a file of i32.
pub(super) fn decode_i32(file: Vec<u8>) -> Result<(Vec<u64>, Vec<i32>), String> {
    let elem = |descr: &str| match descr {
        "<i4" => Ok(("i32", 4)),
        other => Err(format!("dtype {other} is not i32 (<i4)")),
    };
    let (_, shape, bytes) = decode_as(file, elem)?;
    Ok((shape, bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()))
}

/// The elements' type, whose name and size `elem` returns, the shape, and the bytes in C order.
fn decode_as<E: fmt::Display>(
    mut file: Vec<u8>,
    elem: impl FnOnce(&str) -> Result<(E, u64), String>,
) -> Result<(E, Vec<u64>, Vec<u8>), String> {
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

    let Header { descr, fortran, shape } = Header::parse(header)?;
    let (dtype, size) = elem(descr)?;
    let expected = shape.iter().try_fold(size, |product, &extent| product.checked_mul(extent));
    if expected != Some(data.len() as u64) {
        let expected = expected.map_or("more than 2^64".to_owned(), |expected| expected.to_string());
        return Err(format!(
            "shape {shape:?} of {dtype} needs {expected} bytes, but {} follow the header",
            data.len()
        ));
    }
    if fortran && shape.iter().filter(|&&extent| extent > 1).count() > 1 {
        let bytes = transposed(data, &shape, size as usize)?;
        return Ok((dtype, shape, bytes));
    }
    let header_bytes = file.len() - data.len();
    file.drain(..header_bytes);
    Ok((dtype, shape, file))
}

/// Reorders elements from first axis fastest to last axis fastest.
fn transposed(data: &[u8], shape: &[u64], size: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(data.len()).map_err(|error| format!("{} bytes: {error}", data.len()))?;
    let mut index = vec![0u64; shape.len()];
    let strides: Vec<u64> = shape
        .iter()
        .scan(1, |stride, &extent| {
            let this = *stride;
            *stride *= extent;
            Some(this)
        })
        .collect();
    for _ in 0..data.len() / size {
        let at: u64 = index.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
        bytes.extend_from_slice(&data[at as usize * size..][..size]);
        for (i, &extent) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < extent {
                break;
            }
            *i = 0;
        }
    }
    Ok(bytes)
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

/// Content of the header's dict, which has all three keys once each and no other.
#[derive(Debug, PartialEq)]
struct Header<'a> {
    descr: &'a str,
    fortran: bool,
    shape: Vec<u64>,
}

impl<'a> Header<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        let unlike = || "its header is no dict of descr, fortran_order and shape".to_owned();
        let mut rest = text.trim().strip_prefix('{').ok_or_else(unlike)?.trim_start();
        while !rest.starts_with('}') {
            let (key, after) = quoted(rest).ok_or_else(unlike)?;
            let value = after.trim_start().strip_prefix(':').ok_or_else(unlike)?.trim_start();
            let after = match key {
                "descr" if descr.is_none() => {
                    let (name, after) = quoted(value).ok_or("its header has no plain descr")?;
                    descr = Some(name);
                    after
                }
                "fortran_order" if fortran.is_none() => {
                    let end = value.find([',', '}', ' ']).unwrap_or(value.len());
                    fortran = Some(match &value[..end] {
                        "True" => true,
                        "False" => false,
                        other => return Err(format!("fortran_order `{other}` is neither True nor False")),
                    });
                    &value[end..]
                }
                "shape" if shape.is_none() => {
                    let (extents, after) = tuple(value).ok_or("its header has no shape of whole numbers")?;
                    shape = Some(extents);
                    after
                }
                _ => return Err(format!("its header has the key `{key}` too many")),
            };
            let after = after.trim_start();
            rest = match after.strip_prefix(',') {
                Some(next) => next.trim_start(),
                None if after.starts_with('}') => after,
                None => return Err(unlike()),
            };
        }
        if rest != "}" {
            return Err(unlike());
        }
        let (descr, fortran, shape) = (
            descr.ok_or("its header has no descr")?,
            fortran.ok_or("its header has no fortran_order")?,
            shape.ok_or("its header has no shape")?,
        );
        Ok(Self { descr, fortran, shape })
    }
}

fn dtype(descr: &str, raw: Option<DType>) -> Result<DType, String> {
    let size = match descr {
        "<f4" => return Ok(DType::F32),
        "<f2" => return Ok(DType::F16),
        "<f8" => return Err("dtype f64 (<f8) is not taken: convert it, `a.astype(numpy.float32)`".into()),
        // Numpy's spelling of the bfloat16 and FP8 types of `ml_dtypes`.
        "<V2" | "|V2" => 2,
        "<V1" | "|V1" => 1,
        other => {
            return Err(format!(
                "dtype {other} is neither f32 (<f4) nor f16 (<f2); of bf16 and FP8 save the raw bytes, \
                 `a.view('V2')` or `a.view('V1')`, and give --prec"
            ));
        }
    };
    match raw {
        Some(dtype) if dtype.size_bytes() == size => Ok(dtype),
        Some(dtype) => {
            Err(format!("dtype {descr} has {size} bytes an element, but {dtype} has {}", dtype.size_bytes()))
        }
        None => Err(format!(
            "dtype {descr} is {size} raw bytes an element: say what they are, --prec {}",
            if size == 2 { "bf16" } else { "fp8, bf8, e4m3fnuz or e5m2fnuz" }
        )),
    }
}

/// A text between quotes, and the rest after it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
    text[1..].split_once(quote)
}

fn tuple(text: &str) -> Option<(Vec<u64>, &str)> {
    let (inside, after) = text.strip_prefix('(')?.split_once(')')?;
    let extents = inside.trim().trim_end_matches(',');
    if extents.is_empty() {
        return Some((Vec::new(), after));
    }
    let extents = extents.split(',').map(|extent| {
        let extent = extent.trim();
        // Python 2 wrote its long numbers with an L.
        let digits = extent.strip_suffix('L').unwrap_or(extent);
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    });
    Some((extents.collect::<Option<_>>()?, after))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(dict: &str, data: &[u8]) -> Vec<u8> {
        [MAGIC, &[1, 0], &(dict.len() as u16).to_le_bytes(), dict.as_bytes(), data].concat()
    }

    #[test]
    fn what_numpy_writes_is_read() {
        // The header that numpy 2.4 writes for numpy.zeros((1, 2), "float16").
        let dict = "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }                \n";
        let tensor = decode(file(dict, &[0, 60, 0, 64]), None).unwrap();
        assert_eq!((tensor.dtype, tensor.shape.as_slice()), (DType::F16, &[1, 2][..]));
        assert_eq!(tensor.values().collect::<Vec<_>>(), [1.0, 2.0]);
    }

    #[test]
    fn fortrans_order_is_read_as_what_it_is() {
        let bytes: Vec<u8> = (1..=6u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
        let read = |order: &str| {
            let dict = format!("{{'descr': '<f4', 'fortran_order': {order}, 'shape': (2, 3), }}");
            decode(file(&dict, &bytes), None).map(|tensor| tensor.values().collect::<Vec<_>>())
        };
        assert_eq!(read("False").unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(read("True").unwrap(), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        for other in ["7", "true", "Truely", "1", ""] {
            assert!(read(other).unwrap_err().contains(&format!("`{other}`")), "{other}");
        }
    }

    #[test]
    fn raw_bytes_are_what_the_user_says_and_nothing_unsaid() {
        let dict = "{'descr': '<V2', 'fortran_order': False, 'shape': (2,), }";
        let tensor = |raw| decode(file(dict, &[0x80, 0x3f, 0, 0x40]), raw);
        assert_eq!(tensor(Some(DType::Bf16)).unwrap().values().collect::<Vec<_>>(), [1.0, 2.0]);
        assert!(tensor(None).unwrap_err().contains("--prec bf16"));
        assert!(tensor(Some(DType::E5m2)).unwrap_err().contains("e5m2 has 1"));
    }

    #[test]
    fn our_header_reads_back_and_aligns_the_data() {
        for shape in [vec![], vec![3], vec![1, 2, 3, 4]] {
            let elems: u64 = shape.iter().product();
            let tensor = Tensor { dtype: DType::F32, shape, bytes: vec![7; 4 * elems as usize] };
            let mut bytes = header(&tensor).unwrap();
            assert_eq!(bytes.len() % 64, 0);
            bytes.extend_from_slice(&tensor.bytes);
            assert_eq!(decode(bytes, None), Ok(tensor));
        }
    }

    #[test]
    fn a_damaged_file_is_refused_wherever_the_damage_is() {
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", &[0; 8]);
        assert!(decode(whole.clone(), None).is_ok());
        for length in 0..whole.len() {
            assert!(decode(whole[..length].to_vec(), None).is_err(), "{length} bytes");
        }
        for at in 0..whole.len() - 8 {
            for byte in [0, b' ', b'9', 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = byte;
                // Damage to blanks does no harm; an accepted tensor must still have its stated size.
                if let Ok(tensor) = decode(damaged, None) {
                    assert_eq!(tensor.bytes.len(), 8);
                }
            }
        }
        for dict in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
            "{'descr': '>f4', 'fortran_order': False, 'shape': (2, 1), }",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 1), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 1), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), 'more': 1}",
            "{'descr': '<f4', 'fortran_order': False, 'fortran_order': False, 'shape': (2, 1)}",
            "{'descr': '<f4', 'shape': (2, 1)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1)} x",
        ] {
            assert!(decode(file(dict, &[0; 8]), None).is_err(), "{dict}");
        }
    }

    proptest! {
        #![proptest_config(crate::fuzz::config(20_000))]

        /// Any bytes are refused, or give a tensor of the stated size; nothing panics.
        #[test]
        fn any_bytes_are_refused_or_a_whole_tensor(
            header in "\\PC{0,40}|[{}'(): ,0-9a-zA-Z<|]{0,80}|\\{'descr': '<[fV][124]', 'fortran_order': (True|False), 'shape': \\([0-9, L]{0,12}\\)[, ]{0,2}\\}",
            data in prop::collection::vec(any::<u8>(), 0..40),
            version in 0u8..4,
        ) {
            let length = header.len() as u32;
            let length = if version < 2 { length.to_le_bytes()[..2].to_vec() } else { length.to_le_bytes().to_vec() };
            let bytes = [MAGIC, &[version, 0], &length, header.as_bytes(), &data].concat();
            if let Ok(tensor) = decode(bytes, Some(DType::Bf16)) {
                let elems: u64 = tensor.shape.iter().product();
                prop_assert_eq!(elems * tensor.dtype.size_bytes(), tensor.bytes.len() as u64);
            }
        }
    }
}
