//! Rows of bytes of a latent cache: FP8 values with their own scales, and a rotary part in 16 bits.

use super::{Dims, FwdProblem};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::fp8::E4m3Fn;
use crate::layout::{KvLayout, Shape};

/// Format of the rows of a quantised latent cache, as in `FlashMLA`. A value is its E4M3 number times its scale in
/// f32, rounded to bf16; the last 64 elements are bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheRows {
    /// `DeepSeek` V3.2's: 512 values in E4M3, 4 scales in f32 of 128 values each, 64 elements in bf16. V is the first
    /// 512 of 576 elements.
    Bytes656,
    /// `DeepSeek` V4's format. A page begins with 576 bytes for each row, 448 values in E4M3 and 64 elements in
    /// bf16. After them come 8 bytes for each row: 7 scales in E8M0 for 64 values each, and one byte that is not
    /// read. V is all 512 elements.
    Bytes584,
}

/// Exponent of the least power of two, from 2^-126 up, for which the greatest of these numbers divided by it is at most
/// 448. If there is none, the result is 119: 448 times a larger power would be infinite. NaNs are ignored.
fn fitting_exponent(numbers: &[f32]) -> i32 {
    let greatest = numbers.iter().fold(0f32, |greatest, x| greatest.max(x.abs()));
    // The limit 448 is 1.75 times 2^8.
    let is_above = greatest.to_bits() & 0x7f_ffff > 0x60_0000;
    let exponent = (greatest.to_bits() >> 23) as i32 - 127 - 8 + i32::from(is_above);
    exponent.clamp(-126, 119)
}

/// The power 2^exponent, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Number of bf16 elements at a row's end.
const ROTARY: u32 = 64;

impl CacheRows {
    /// Bytes of a row, scales included.
    #[must_use]
    pub const fn row_bytes(self) -> u32 {
        match self {
            Self::Bytes656 => 656,
            Self::Bytes584 => 584,
        }
    }

    /// Number of a row's values in E4M3.
    #[must_use]
    pub const fn values(self) -> u32 {
        match self {
            Self::Bytes656 => 512,
            Self::Bytes584 => 448,
        }
    }

    /// Bytes from the start of a row to the start of the page's next row.
    #[must_use]
    pub const fn stride(self) -> u32 {
        match self {
            Self::Bytes656 => 656,
            Self::Bytes584 => 576,
        }
    }

    /// Number of values that share a scale.
    #[must_use]
    pub const fn group(self) -> u32 {
        match self {
            Self::Bytes656 => 128,
            Self::Bytes584 => 64,
        }
    }

    /// Number of elements of a row of K.
    #[must_use]
    pub const fn head_dim_qk(self) -> u32 {
        self.values() + ROTARY
    }

    /// Number of elements of a row of V.
    pub const HEAD_DIM_V: u32 = 512;

    /// Byte offsets within the page of a row's values, of its scales, and of its bf16 elements.
    #[must_use]
    pub const fn places(self, page_size: u32, row: u32) -> [usize; 3] {
        let (row, values, stride) = (row as usize, self.values() as usize, self.stride() as usize);
        let at = row * stride;
        match self {
            Self::Bytes656 => [at, at + values, at + values + 16],
            Self::Bytes584 => [at, page_size as usize * stride + row * 8, at + values],
        }
    }

    /// Writes the elements of a row, as bits of bf16, to `to`, which has at most `head_dim_qk` elements. `page` is
    /// the page's bytes.
    pub fn read_bf16(self, page: &[u8], page_size: u32, row: u32, to: &mut [u16]) {
        let [values, scales, rotary] = self.places(page_size, row);
        let (count, group) = (self.values() as usize, self.group() as usize);
        let (quantised, rest) = to.split_at_mut(count.min(to.len()));
        for (n, to) in quantised.chunks_mut(group).enumerate() {
            let scale = self.scale(&page[scales..], n);
            for (to, &code) in to.iter_mut().zip(&page[values + n * group..]) {
                let value = E4m3Fn::from_bits(code).to_f32() * scale;
                *to = half::bf16::from_f32(value).to_bits();
            }
        }
        for (d, to) in rest.iter_mut().enumerate() {
            *to = u16::from_le_bytes([page[rotary + 2 * d], page[rotary + 2 * d + 1]]);
        }
    }

    /// Writes a row. `put` gets each byte with its offset in the page. A group's scale is the least power of two, from
    /// 2^-126 to 2^119, by which its greatest value fits E4M3; a value is rounded to the nearest, and saturates. `from`
    /// are the row's elements, of which those behind the values are rounded to bf16.
    pub fn write(self, page_size: u32, row: u32, from: &[f32], mut put: impl FnMut(usize, u8)) {
        let [values, scales, rotary] = self.places(page_size, row);
        let (quantised, rest) = from.split_at(self.values() as usize);
        let group = self.group() as usize;
        for (n, numbers) in quantised.chunks(group).enumerate() {
            let exponent = fitting_exponent(numbers);
            match self {
                Self::Bytes656 => {
                    let bytes = power_of_two(exponent).to_le_bytes();
                    bytes.into_iter().enumerate().for_each(|(at, byte)| put(scales + 4 * n + at, byte));
                }
                Self::Bytes584 => put(scales + n, (exponent + 127) as u8),
            }
            let inverse = power_of_two(-exponent);
            for (d, &x) in numbers.iter().enumerate() {
                put(values + n * group + d, E4m3Fn::from_f64_saturating(f64::from(x * inverse)).to_bits());
            }
        }
        for (d, &x) in rest.iter().enumerate() {
            let bits = half::bf16::from_f32(x).to_bits().to_le_bytes();
            bits.into_iter().enumerate().for_each(|(at, byte)| put(rotary + 2 * d + at, byte));
        }
    }

    /// Replaces a row's elements by those that are read after the row was written.
    pub fn round(self, row: &mut [f32]) {
        let mut page = vec![0; self.row_bytes() as usize];
        self.write(1, 0, row, |at, byte| page[at] = byte);
        self.read(&page, 1, 0, row);
    }

    /// The n-th of a row's scales, which begin at `scales`.
    fn scale(self, scales: &[u8], n: usize) -> f32 {
        match self {
            Self::Bytes656 => DType::F32.read(&scales[4 * n..]) as f32,
            // This code stands for NaN.
            Self::Bytes584 if scales[n] == u8::MAX => f32::NAN,
            Self::Bytes584 => 2f32.powi(i32::from(scales[n]) - 127),
        }
    }

    /// Elements of a row as [`read_bf16`](Self::read_bf16) gives them, as f32.
    pub fn read(self, page: &[u8], page_size: u32, row: u32, to: &mut [f32]) {
        let mut bits = vec![0; to.len()];
        self.read_bf16(page, page_size, row, &mut bits);
        for (to, bits) in to.iter_mut().zip(bits) {
            *to = half::bf16::from_bits(bits).to_f32();
        }
    }
}

impl FwdProblem {
    /// K's shape in memory and its element type there: bytes, if the cache has rows of bytes.
    #[must_use]
    pub fn k_in_memory(&self, shape: Shape) -> (Shape, DType) {
        match self.cache.rows {
            None => (shape, self.stored_k()),
            Some(rows) => (Shape { dim: rows.row_bytes(), ..shape }, super::BYTE),
        }
    }

    /// V's shape in memory and its element type there: bytes, if V lies in rows of bytes.
    #[must_use]
    pub fn v_in_memory(&self, shape: Shape) -> (Shape, DType) {
        match self.cache.rows {
            None => (shape, self.stored_v()),
            Some(_) => self.k_in_memory(shape),
        }
    }

    /// Checks a cache with rows of bytes.
    ///
    /// # Errors
    /// The name of a field that cannot be combined with rows of bytes.
    pub(crate) fn check_cache_rows(&self) -> Result<(), ProblemError> {
        let Some(rows) = self.cache.rows else { return Ok(()) };
        let bytes = rows.row_bytes();
        let Dims { num_heads_kv, head_dim_qk, head_dim_v, .. } = self.dims;
        let (wanted_qk, wanted_v) = (rows.head_dim_qk(), CacheRows::HEAD_DIM_V);
        ensure!(
            (head_dim_qk, head_dim_v) == (wanted_qk, wanted_v),
            "cache_rows",
            "cache_rows of {bytes} bytes have head_dim_qk {wanted_qk} and head_dim_v {wanted_v}, not {head_dim_qk} and \
             {head_dim_v}"
        );
        ensure!(
            num_heads_kv == 1,
            "cache_rows",
            "cache_rows of {bytes} bytes are of 1 kv head, but num_heads_kv is {num_heads_kv}"
        );
        let (qk, v) = (self.dtypes.qk, self.dtypes.v);
        ensure!(
            qk == DType::Bf16 && v == qk && self.cache.dtype.is_none(),
            "cache_rows",
            "cache_rows of {bytes} bytes go with dtype_qk and dtype_v bf16, not {qk} and {v}, and no dtype_cache"
        );
        ensure!(
            self.cache.v_in_k,
            "cache_rows",
            "cache_rows of {bytes} bytes have V in K's rows, but v_in_k is false"
        );
        let KvLayout::Paged { .. } = self.layout.kv else {
            let text = format!("cache_rows of {bytes} bytes need pages, not kv_layout {:?}", self.layout.kv);
            return Err(ProblemError::new("cache_rows", text));
        };
        ensure!(
            self.strides.k.seq == i64::from(bytes) && self.strides.k.dim == 1,
            "cache_rows",
            "cache_rows of {bytes} bytes lie one after another, but k.seq stride is {} and k.dim stride {}",
            self.strides.k.seq,
            self.strides.k.dim
        );
        if let (Some(append), Some(rotary)) = (&self.cache.append, &self.cache.rotary) {
            let text = format!(
                "cache_rows of {bytes} bytes beside an append of seqlen_new {} and rotary of dim {}: turned rows are \
                 not quantised",
                append.seqlen_new, rotary.dim
            );
            return Err(ProblemError::new("cache_rows", text));
        }
        match (self.lists, self.second) {
            (None, None) => self.check_beside_walk(&format!("cache_rows of {bytes} bytes without indices")),
            // Lists and a second cache are checked elsewhere.
            _ => Ok(()),
        }
    }

    /// Refuses a problem whose cache has rows of bytes (FP8 elements, scales and a 16-bit tail in one row), for kernels
    /// that read none.
    ///
    /// # Errors
    /// The cache has rows of bytes.
    pub fn refuse_cache_rows(&self, kernel: &str) -> Result<(), Refusal> {
        match self.cache.rows {
            None => Ok(()),
            Some(rows) => {
                let text = format!("cache_rows of {} bytes are not in this kernel", rows.row_bytes());
                Err(Refusal::new(kernel, text))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;

    /// A page of two rows: the second row has the bytes that are read, the first bytes that must not be read.
    fn page(rows: CacheRows, scale: &[u8]) -> Vec<u8> {
        let mut page = vec![0x7f; rows.row_bytes() as usize * 2];
        let [values, scales, rotary] = rows.places(2, 1);
        for d in 0..rows.values() as usize {
            // The byte is 1.125 in E4M3.
            page[values + d] = 0x39;
        }
        for group in 0..(rows.values() / rows.group()) as usize {
            page[scales + group * scale.len()..][..scale.len()].copy_from_slice(scale);
        }
        for d in 0..ROTARY as usize {
            // The element is -2 in bf16.
            page[rotary + 2 * d..][..2].copy_from_slice(&0xc000u16.to_le_bytes());
        }
        page
    }

    #[test]
    fn a_row_of_bytes_is_its_values_times_their_scales_and_its_rotary_part() {
        let cases = [(CacheRows::Bytes656, 0.5f32.to_le_bytes().to_vec()), (CacheRows::Bytes584, vec![126])];
        for (rows, scale) in cases {
            let page = page(rows, &scale);
            let mut row = vec![0f32; rows.head_dim_qk() as usize];
            rows.read(&page, 2, 1, &mut row);
            let values = rows.values() as usize;
            assert!(row[..values].iter().all(|&x| x == 0.5625), "{rows:?}");
            assert!(row[values..].iter().all(|&x| x == -2.0), "{rows:?}");
        }
        assert_eq!(CacheRows::Bytes656.head_dim_qk(), 576);
        assert_eq!(CacheRows::Bytes584.head_dim_qk(), 512);
    }

    #[test]
    fn a_row_is_written_with_the_least_scales_that_fit_its_values() {
        for rows in [CacheRows::Bytes656, CacheRows::Bytes584] {
            let (dim, group) = (rows.head_dim_qk() as usize, rows.group() as usize);
            let mut row = vec![0f32; dim];
            // A group of zeros, one whose greatest value is 448 as it is, one that takes twice the scale, and one with
            // an infinity, which saturates.
            (row[group], row[group + 1]) = (-448.0, 1.0);
            (row[2 * group], row[2 * group + 1], row[2 * group + 2]) = (450.0, 1.0, f32::NAN);
            row[3 * group] = f32::INFINITY;
            row[dim - 1] = 1.0 + 1.0 / 512.0;
            rows.round(&mut row);
            assert_eq!((row[0], row[group], row[group + 1]), (0.0, -448.0, 1.0));
            assert_eq!((row[2 * group], row[2 * group + 1]), (448.0, 1.0));
            assert!(row[2 * group + 2].is_nan());
            assert_eq!(row[3 * group], 448.0 * 2f32.powi(119));
            assert_eq!(row[dim - 1], 1.0);
        }
        let exponents = [0.0, 1e-45, 448.0, 448.1, 1.0, f32::MAX].map(|x| fitting_exponent(&[x, f32::NAN]));
        assert_eq!(exponents, [-126, -126, 0, 1, -8, 119]);
    }

    #[test]
    fn rows_of_bytes_without_lists_are_walked_one_by_one_and_refuse_what_a_walk_lacks() {
        let rows = CacheRows::Bytes656;
        let dims =
            Dims::batch(2).seqlens(3, 100).heads(4, 1).head_dims(rows.head_dim_qk(), CacheRows::HEAD_DIM_V);
        let layout = KvLayout::Paged { page_size: 16 };
        let plain = || {
            let mut problem = FwdProblem::new(crate::QLayout::Batch, layout, DType::Bf16, dims);
            problem = problem.v_in_k(true).cache_rows(rows);
            problem.strides.k = crate::Strides::bshd(problem.k_in_memory(problem.shape_k()).0);
            problem.strides.v = problem.strides.k;
            problem
        };
        let walked = plain().validate().unwrap();
        assert!(walked.walks_lists() && walked.walks_caches());
        let lists = crate::problem::KeyLists::new(&plain(), 3);
        let listed = plain().p_drop(0.5).lists(lists);
        assert!(listed.walks_lists() && !listed.walks_caches());
        listed.validate().unwrap();
        for (problem, field, text) in [
            (plain().p_drop(0.5), "p_drop", "p_drop 0.5 beside cache_rows of 656 bytes without indices"),
            (plain().row_max(true), "row_max", "row_max is wanted beside cache_rows"),
        ] {
            let error = problem.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.contains(text), "{error}");
        }
    }
}
