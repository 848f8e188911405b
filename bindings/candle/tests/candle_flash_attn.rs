//! Checks of candle-flash-attn's own tests (0.11.1: `candle-flash-attn/tests/flash_attn_tests.rs`, and those
//! of candle-flash-attn-v3), on other numbers and on the CPU too. Each test names its original. The originals
//! compare with candle's own operations in f32 within fixed distances; these compare in f64 within the same
//! distances.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod plain;

use candle_core::{DType, Result, Tensor};
use fmha_candle as candle_flash_attn;
use plain::{Plain, close, device, f64s};

/// A ramp from 0, like theirs, in `dtype`: `[rows, heads, dim]`, up to `largest`.
fn ramp(dims: (usize, usize, usize), largest: f64, dtype: DType) -> Result<Tensor> {
    let count = dims.0 * dims.1 * dims.2;
    let elems = Tensor::arange(0u32, count as u32, &device())?.to_dtype(DType::F64)?;
    (elems * (largest / count as f64))?.to_dtype(dtype)?.reshape(dims)
}

/// Numbers that go up and down with a period that is prime, around 0.
fn saw(dims: (usize, usize, usize), period: usize, largest: f32) -> Result<Tensor> {
    let count = dims.0 * dims.1 * dims.2;
    let middle = (period / 2) as f32;
    let elems: Vec<f32> = (0..count).map(|at| ((at % period) as f32 - middle) / middle * largest).collect();
    Tensor::from_vec(elems, dims, &device())?.to_dtype(DType::BF16)
}

fn written_out(plain: &Plain, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::F64));
    Ok(plain.attend(&q?, &k?, &v?)?.0)
}

/// `flash_attn_acausal`, and v3's: heads and rows swapped in memory, a scale that is not the default.
#[test]
fn every_key_is_seen_by_every_query_of_transposed_tensors() -> Result<()> {
    let q = ramp((2, 3, 8), 1.6, DType::F16)?; // [heads, rows, dim]
    let (k, v) = (ramp((2, 3, 8), 1.2, DType::F16)?, ramp((2, 3, 8), 0.95, DType::F16)?);
    let [q, k, v] = [q.transpose(0, 1)?, k.transpose(0, 1)?, v.transpose(0, 1)?];
    let o = candle_flash_attn::flash_attn(&q.unsqueeze(0)?, &k.unsqueeze(0)?, &v.unsqueeze(0)?, 0.5, false)?;
    assert_eq!(o.dims(), [1, 3, 2, 8]);
    let plain = Plain { scale: 0.5, ..Plain::new(8) };
    close(&o.squeeze(0)?, &written_out(&plain, &q, &k, &v)?, 1e-3);
    Ok(())
}

/// v3's `flash_attn_acausal_gqa`: query heads that share the keys and values of one.
#[test]
fn query_heads_share_keys_and_values() -> Result<()> {
    let q = saw((10, 4, 128), 97, 1.0)?;
    let (k, v) = (saw((10, 2, 128), 89, 0.5)?, saw((10, 2, 128), 83, 0.5)?);
    let o = candle_flash_attn::flash_attn(&q.unsqueeze(0)?, &k.unsqueeze(0)?, &v.unsqueeze(0)?, 0.5, false)?;
    let plain = Plain { scale: 0.5, ..Plain::new(128) };
    close(&o.squeeze(0)?, &written_out(&plain, &q, &k, &v)?, 1e-2);
    Ok(())
}

/// `flash_attn_acausal_softcap`: no slopes, no window, a scale of 1, scores capped at 5.
#[test]
fn scores_are_capped_softly_without_slopes_or_a_window() -> Result<()> {
    let q = ramp((3, 5, 8), 4.0, DType::F16)?;
    let (k, v) = (ramp((3, 5, 8), 3.0, DType::F16)?, ramp((3, 5, 8), 2.4, DType::F16)?);
    let o = candle_flash_attn::flash_attn_alibi_windowed_softcap(
        &q.unsqueeze(0)?,
        &k.unsqueeze(0)?,
        &v.unsqueeze(0)?,
        None,
        1.0,
        None,
        None,
        5.0,
    )?;
    let capped = Plain { scale: 1.0, softcap: Some(5.0), ..Plain::new(8) };
    let right = written_out(&capped, &q, &k, &v)?;
    close(&o.squeeze(0)?, &right, 2e-3);
    // The cap is seen at all.
    let uncapped = written_out(&Plain { scale: 1.0, ..Plain::new(8) }, &q, &k, &v)?;
    assert!((f64s(&uncapped)[0] - f64s(&right)[0]).abs() > 0.01);
    Ok(())
}

/// `flash_attn_varlen`: one packed sequence; the maximum length that the call states is far above its length.
#[test]
fn the_longest_sequence_may_be_shorter_than_what_is_said() -> Result<()> {
    let q = ramp((3, 2, 8), 1.6, DType::F16)?;
    let (k, v) = (ramp((3, 2, 8), 1.2, DType::F16)?, ramp((3, 2, 8), 0.95, DType::F16)?);
    let seqlens = Tensor::new(&[0u32, 3], &device())?;
    let o = candle_flash_attn::flash_attn_varlen(&q, &k, &v, &seqlens, &seqlens, 32, 32, 0.5, false)?;
    assert_eq!(o.dims(), [3, 2, 8]);
    let plain = Plain { scale: 0.5, ..Plain::new(8) };
    close(&o, &written_out(&plain, &q, &k, &v)?, 1e-3);
    Ok(())
}

/// A sequence whose keys fill their last page in part, in `pool` pages of 32 rows: logical page i is number
/// `page_of(i)`.
fn paged(head_dim: usize, spare: usize, page_of: fn(usize, usize) -> usize) -> Result<()> {
    const PAGE: usize = 32;
    let (rows, heads, heads_kv) = (104, 4, 1);
    let q = saw((rows, heads, head_dim), 251, 1.0)?;
    let (k, v) = (saw((rows, heads_kv, head_dim), 193, 0.25)?, saw((rows, heads_kv, head_dim), 197, 0.2)?);
    let pages = rows.div_ceil(PAGE);
    let pool = pages + spare;
    let table: Vec<u32> = (0..pages).map(|page| page_of(page, pool) as u32).collect();
    // Pages that no sequence uses, and rows beyond the last key, hold NaN.
    let nan = Tensor::full(f32::NAN, (PAGE, heads_kv, head_dim), &device())?.to_dtype(DType::BF16)?;
    let scattered = |tensor: &Tensor| -> Result<Tensor> {
        let mut numbers = vec![nan.clone(); pool];
        for (page, &number) in table.iter().enumerate() {
            let count = PAGE.min(rows - page * PAGE);
            let held = tensor.narrow(0, page * PAGE, count)?;
            numbers[number as usize] = Tensor::cat(&[&held, &nan.narrow(0, count, PAGE - count)?], 0)?;
        }
        Tensor::stack(&numbers, 0)
    };
    let (paged_k, paged_v) = (scattered(&k)?, scattered(&v)?);
    let seqlens = Tensor::new(&[0u32, rows as u32], &device())?;
    let table = Tensor::from_vec(table, (1, pages), &device())?;
    let run = |ranges: Option<&Tensor>| {
        candle_flash_attn::flash_attn_varlen_paged_windowed(
            &q,
            &paged_k,
            &paged_v,
            &seqlens,
            &seqlens,
            &table,
            ranges,
            rows,
            rows,
            1.0,
            Some(1024),
            Some(0),
            PAGE,
            None,
        )
    };
    let plain = Plain { scale: 1.0, left: Some(1024), ..Plain::causal(head_dim) };
    close(&run(None)?, &written_out(&plain, &q, &k, &v)?, 1e-2);
    // A candle-flash-attn option that the contract lacks is refused by its name, never ignored.
    let ranges = Tensor::new(&[[[6i32, 90]]], &device())?;
    let refused = run(Some(&ranges)).unwrap_err().to_string();
    assert!(refused.contains("mm_prefix_ranges"), "{refused}");
    Ok(())
}

/// `flash_attn_varlen_paged_mm_prefix_windowed`: a window larger than the sequence, pages in their order.
#[test]
fn a_paged_cache_in_its_order_and_what_it_is_refused() -> Result<()> {
    paged(256, 0, |page, _| page)
}

/// `flash_attn_varlen_paged_shuffled_block_table_hd256`: pages anywhere in a larger pool.
#[test]
fn a_shuffled_paged_cache_of_head_dimension_256() -> Result<()> {
    paged(256, 7, |page, pool| (page * 5 + 3) % pool)
}

/// `flash_attn_varlen_paged_shuffled_block_table_hd512`.
#[test]
fn a_shuffled_paged_cache_of_head_dimension_512() -> Result<()> {
    paged(512, 7, |page, pool| (page * 5 + 3) % pool)
}
