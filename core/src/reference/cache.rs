//! A head's operands from a KV cache: gathered from their places, with new rows, rotated by position, and converted
//! from a narrower cache type.

use num_traits::Float;

use super::head::{Inputs, Rows, host, real};
use crate::args::DevSlice;
use crate::dtype::DType;
use crate::error::ProblemError;
use crate::layout::Strides;
use crate::problem::{CacheScales, FwdProblem};
use crate::scaled_rows::ScaledRows;
use crate::seq::{KvRows, SeqSpan};

/// One sequence's operands, read from a KV cache.
#[derive(Clone, Copy)]
pub(super) struct Cached<'a> {
    pub(super) problem: &'a FwdProblem,
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) span: SeqSpan,
    /// Whether values of a format with scales by blocks are rounded to `dtype_qk`.
    pub(super) rounds: bool,
}

impl<'a> Cached<'a> {
    /// Rows of Q of one head, `[seqlen_q, head_dim_qk]`.
    pub(super) fn queries<T: Float>(self, head: u32, descale: T) -> Result<Vec<T>, ProblemError> {
        let Self { problem, inputs, span, .. } = self;
        if let Some([q, _, _]) = self.scaled()? {
            let place = |i| (span.q_batch, span.q_row + i);
            return Ok(self.values_of(q, place, head, (span.seqlen_q, problem.dims.head_dim_qk), descale));
        }
        let q = Rows { name: "q", slice: inputs.q, dtype: problem.dtypes.qk, strides: problem.strides.q };
        let dim = problem.dims.head_dim_qk;
        let mut rows = q.gather(|i| (span.q_batch, span.q_row + i), head, span.seqlen_q, dim, T::one())?;
        let advances = u32::from(problem.positions_advance());
        self.turn(&mut rows, |i| span.seqlen_cached + advances * i)?;
        // Rows in the cache have been rotated before they were stored.
        Ok(rows.into_iter().map(|x| x * descale).collect())
    }

    /// Rows of K of one kv head, `[seqlen_k, head_dim_qk]`.
    pub(super) fn keys<T: Float>(self, head: u32, descale: T) -> Result<Vec<T>, ProblemError> {
        let Self { problem, inputs, span, .. } = self;
        if let Some([_, k, _]) = self.scaled()? {
            let places = KvRows::of(problem, &inputs.seq)?;
            let shape = (self.span.seqlen_k, problem.dims.head_dim_qk);
            return Ok(self.values_of(k, |j| places.at(&self.span, j), head, shape, descale));
        }
        let rows = Rows { name: "k", slice: inputs.k, dtype: problem.stored_k(), strides: problem.strides.k };
        let scales = problem.cache.scales.map(|scales| (scales.k, inputs.cache_scales[0]));
        let mut keys = self.cached(&rows, scales, head, problem.dims.head_dim_qk, descale)?;
        if let (Some(append), Some(new)) = (&problem.cache.append, inputs.cache.k_new) {
            let mut new: Vec<T> =
                self.new_rows("k_new", new, append.k_new, problem.dtypes.qk, head, problem.dims.head_dim_qk)?;
            self.turn(&mut new, |n| span.seqlen_cached + n)?;
            if let Some(format) = problem.cache.rows {
                for row in new.chunks_mut(problem.dims.head_dim_qk as usize) {
                    let mut written: Vec<f32> = row.iter().map(|x| x.to_f32().unwrap_or(f32::NAN)).collect();
                    format.round(&mut written);
                    row.iter_mut().zip(written).for_each(|(x, written)| *x = real(f64::from(written)));
                }
            }
            self.quantise(&mut new, problem.dims.head_dim_qk);
            keys.extend(new.into_iter().map(|x| x * descale));
        }
        Ok(keys)
    }

    /// Rows of V of one kv head, `[seqlen_k, head_dim_v]`.
    pub(super) fn values<T: Float>(self, head: u32, descale: T) -> Result<Vec<T>, ProblemError> {
        let Self { problem, inputs, .. } = self;
        if problem.cache.v_in_k {
            let (qk, v) = (problem.dims.head_dim_qk as usize, problem.dims.head_dim_v as usize);
            let keys: Vec<T> = self.keys(head, descale)?;
            return Ok(keys.chunks(qk).flat_map(|row| &row[..v]).copied().collect());
        }
        if let Some([_, _, v]) = self.scaled()? {
            let places = KvRows::of(problem, &inputs.seq)?;
            let shape = (self.span.seqlen_k, problem.dims.head_dim_v);
            return Ok(self.values_of(v, |j| places.at(&self.span, j), head, shape, descale));
        }
        let rows = Rows { name: "v", slice: inputs.v, dtype: problem.stored_v(), strides: problem.strides.v };
        let scales = problem.cache.scales.map(|scales| (scales.v, inputs.cache_scales[1]));
        let mut values = self.cached(&rows, scales, head, problem.dims.head_dim_v, descale)?;
        if let (Some(append), Some(new)) = (&problem.cache.append, inputs.cache.v_new) {
            let mut new =
                self.new_rows("v_new", new, append.v_new, problem.dtypes.v, head, problem.dims.head_dim_v)?;
            self.quantise(&mut new, problem.dims.head_dim_v);
            values.extend(new.into_iter().map(|x: T| x * descale));
        }
        Ok(values)
    }

    /// Rows of Q, K and V in a format with scales by blocks; `None` in other formats.
    fn scaled(self) -> Result<Option<[ScaledRows<'a>; 3]>, ProblemError> {
        let Inputs { q, k, v, score, .. } = self.inputs;
        ScaledRows::of(self.problem, [*q, *k, *v], score)
    }

    /// Values of rows with scales by blocks, either exact or rounded once.
    fn values_of<T: Float>(
        self,
        rows: ScaledRows<'_>,
        place: impl Fn(u32) -> (u32, u32),
        head: u32,
        (count, dim): (u32, u32),
        descale: T,
    ) -> Vec<T> {
        let mut row = vec![0f32; dim as usize];
        let mut values = Vec::with_capacity(count as usize * dim as usize);
        for (batch, at) in (0..count).map(place) {
            rows.read((batch, at, head), &mut row);
            values.extend(row.iter().map(|&x| {
                let value = real::<T>(f64::from(x)) * descale;
                if !self.rounds {
                    return value;
                }
                real(self.problem.dtypes.qk.round(value.to_f64().unwrap_or(f64::NAN)))
            }));
        }
        values
    }

    /// Replaces new rows by the values that are read back after they were written to a cache with scales by rows.
    fn quantise<T: Float>(self, new: &mut [T], dim: u32) {
        let (Some(stored), Some(_)) = (self.problem.cache.dtype, self.problem.cache.scales) else { return };
        for row in new.chunks_mut(dim as usize) {
            let mut written: Vec<f32> = row.iter().map(|x| x.to_f32().unwrap_or(f32::NAN)).collect();
            let scale = CacheScales::quantise(stored, &mut written);
            for (x, written) in row.iter_mut().zip(written) {
                let value = stored.round(f64::from(written)) as f32 * scale;
                *x = real(self.problem.dtypes.qk.round(f64::from(value)));
            }
        }
    }

    /// Rows that are in the cache before the call. `scales` are one for each row.
    fn cached<T: Float>(
        self,
        rows: &Rows<'_>,
        scales: Option<(Strides, Option<DevSlice<'_>>)>,
        head: u32,
        dim: u32,
        descale: T,
    ) -> Result<Vec<T>, ProblemError> {
        let Self { problem, inputs, span, .. } = self;
        let places = KvRows::of(problem, &inputs.seq)?;
        let place = |j| places.at(&span, j);
        if let Some(format) = problem.cache.rows {
            let (bytes, page_size) = (host(rows.name, Some(&rows.slice))?, problem.layout.kv.page_size());
            let mut row = vec![0f32; dim as usize];
            let mut values = Vec::with_capacity(span.seqlen_cached as usize * dim as usize);
            for (page, at) in (0..span.seqlen_cached).map(place) {
                let first = rows.strides.offset(page, 0, head, 0) as usize;
                format.read(&bytes[first..], page_size.unwrap_or(1), at, &mut row);
                values.extend(row.iter().map(|&x| real::<T>(f64::from(x)) * descale));
            }
            return Ok(values);
        }
        if problem.cache.dtype.is_none() {
            return rows.gather(place, head, span.seqlen_cached, dim, descale);
        }
        // The product in f32 is rounded to Q's type once, as CONTRACT.md says.
        let mut stored: Vec<f32> = rows.gather(place, head, span.seqlen_cached, dim, 1.0)?;
        if let (Some((strides, slice)), Some(of)) = (scales, problem.cache.scales) {
            let bytes = host(rows.name, slice.as_ref())?;
            for (j, row) in (0..).zip(stored.chunks_mut(dim as usize)) {
                let (batch, at) = place(j);
                let scale = strides.offset(batch, at / of.block, head, 0) as usize * 4;
                let scale = DType::F32.read(&bytes[scale..]) as f32;
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let descale = descale.to_f32().unwrap_or(f32::NAN);
        let widened = |x: f32| real(problem.dtypes.qk.round(f64::from(x * descale)));
        Ok(stored.into_iter().map(widened).collect())
    }

    fn new_rows<T: Float>(
        self,
        name: &'static str,
        slice: DevSlice<'_>,
        strides: Strides,
        dtype: DType,
        head: u32,
        dim: u32,
    ) -> Result<Vec<T>, ProblemError> {
        let span = self.span;
        let rows = Rows { name, slice, dtype, strides };
        rows.gather(
            |n| (span.new_batch, span.new_row + n),
            head,
            span.seqlen_k - span.seqlen_cached,
            dim,
            T::one(),
        )
    }

    /// Rotates rows of Q or K by their positions: in f32, rounded to the input's type once.
    fn turn<T: Float>(self, rows: &mut [T], position: impl Fn(u32) -> u32) -> Result<(), ProblemError> {
        let Some(rotary) = self.problem.cache.rotary else { return Ok(()) };
        let cache = &self.inputs.cache;
        let (cos, sin) = (host("cos", cache.cos.as_ref())?, host("sin", cache.sin.as_ref())?);
        let (half, size) = (rotary.dim as usize / 2, rotary.dtype.size_bytes() as usize);
        let dim = self.problem.dims.head_dim_qk as usize;
        for (i, row) in rows.chunks_mut(dim).enumerate() {
            let first = position(i as u32) as usize * half;
            let at =
                |table: &[u8], pair: u32| rotary.dtype.read(&table[(first + pair as usize) * size..]) as f32;
            let mut turned: Vec<f32> = row.iter().map(|x| x.to_f32().unwrap_or(f32::NAN)).collect();
            rotary.turn(&mut turned, |pair| (at(cos, pair), at(sin, pair)));
            for (x, turned) in row.iter_mut().zip(turned).take(rotary.dim as usize) {
                *x = real(self.problem.dtypes.qk.round(f64::from(turned)));
            }
        }
        Ok(())
    }
}
