//! Finite garbage: what unwritten memory and registers hold in place of a NaN, which rows that are computed
//! again would hide.

/// A word of garbage: in each half a number between 1/8 and 2 in magnitude, as f16 and as bf16, and finite as
/// f32 and as two numbers of 8 bits.
pub(crate) fn word(seed: u64, at: u64) -> u32 {
    let mut x = seed ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ x >> 31) as u32 & 0x81bf_81bf | 0x3e00_3e00
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_finite_and_moderate_in_every_type() {
        let words: Vec<u32> = (0..4096).map(|at| word(7, at)).collect();
        for &word in &words {
            let x = f32::from_bits(word).abs();
            assert!((0.125..2.0).contains(&x), "{x}");
            for half in [word & 0xffff, word >> 16] {
                let bf16 = f32::from_bits(half << 16).abs();
                assert!((0.125..2.0).contains(&bf16), "{bf16}");
                // Exponents of f16 from -1 to 0.
                assert!((0x3e00..0x4000).contains(&(half & 0x7fff)), "{half:#x}");
                assert!(half & 0x7f < 0x7c, "{half:#x}");
            }
        }
        assert!(words.windows(2).any(|pair| pair[0] != pair[1]));
        assert_ne!(word(7, 1), word(8, 1));
    }
}
