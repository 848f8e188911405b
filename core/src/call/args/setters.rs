//! Arguments built by name: `new` takes what every call has, setters named like the fields take the rest.

use super::{
    Arrivals, BlockTable, BwdArgs, CacheArgs, CacheSlice, ChooseArgs, CombineArgs, DevSlice, DevSliceMut,
    FwdArgs, MaskArgs, PartialResult, QuantizeArgs, ScoreArgs, SecondArgs, SeqArgs,
};
use crate::dropout::DropoutSeed;
use crate::expr::Number;
use crate::layout::Totals;
use crate::setters::setters;

impl<'a> SeqArgs<'a> {
    setters! {
        /// Number of rows of packed tensors, and number of pages of paged ones.
        totals: Totals => totals;
        /// Packed Q: i32 `[batch + 1]`, first row of each sequence in the memory of Q and O.
        cu_seqlens_q: impl Into<Option<DevSlice<'a>>> => cu_seqlens_q;
        /// Packed K: i32 `[batch + 1]`, first row of each sequence in the memory of K and V.
        cu_seqlens_k: impl Into<Option<DevSlice<'a>>> => cu_seqlens_k;
        /// Paged K: the pages of each sequence.
        block_table: impl Into<Option<BlockTable<'a>>> => block_table;
        /// Packed new keys: i32 `[batch + 1]`, first row of each sequence of k_new and v_new.
        cu_seqlens_new: impl Into<Option<DevSlice<'a>>> => cu_seqlens_new;
        /// i32 `[batch]`: number of queries in use of each sequence.
        seqused_q: impl Into<Option<DevSlice<'a>>> => seqused_q;
        /// i32 `[batch]`: number of each sequence's keys that are in the cache before the call.
        seqused_k: impl Into<Option<DevSlice<'a>>> => seqused_k;
        /// i32: the keys that each token lists.
        indices: impl Into<Option<DevSlice<'a>>> => indices;
        /// i32: number of entries in use of each list of keys.
        topk_length: impl Into<Option<DevSlice<'a>>> => topk_length;
        /// Flags in memory that announce which pieces of K and V have arrived.
        arrivals: impl Into<Option<Arrivals<'a>>> => arrivals;
    }
}

impl<'a> ChooseArgs<'a> {
    setters! {
        /// An indexer's q.
        q: impl Into<Option<DevSlice<'a>>> => q;
        /// An indexer's k.
        k: impl Into<Option<DevSlice<'a>>> => k;
        /// An indexer's weights of heads, f32.
        weights: impl Into<Option<DevSlice<'a>>> => weights;
        /// Scales of keys, f32.
        k_scale: impl Into<Option<DevSlice<'a>>> => k_scale;
        /// Pages of each sequence, i32.
        block_table: impl Into<Option<DevSlice<'a>>> => block_table;
        /// Scores that the caller gives in place of an indexer's, f32.
        given: impl Into<Option<DevSlice<'a>>> => given;
        /// Keys of each sequence, i32.
        seqused_k: impl Into<Option<DevSlice<'a>>> => seqused_k;
        /// The first candidate of each query, i32.
        first: impl Into<Option<DevSlice<'a>>> => first;
        /// One past the last candidate of each query, i32.
        end: impl Into<Option<DevSlice<'a>>> => end;
        /// Output: the lists of chosen keys or blocks, i32.
        indices: impl Into<Option<DevSliceMut<'a>>> => indices;
        /// The scores, f32.
        scores: impl Into<Option<DevSliceMut<'a>>> => scores;
        /// Scratch memory of the size that the plan states.
        workspace: impl Into<Option<DevSliceMut<'a>>> => workspace;
    }
}

impl<'a> QuantizeArgs<'a> {
    /// Makes arguments of a tensor, and of memory for its elements and the scales of its blocks.
    #[must_use]
    pub fn new(x: DevSlice<'a>, elements: DevSliceMut<'a>, scales: DevSliceMut<'a>) -> Self {
        Self { x, elements, scales, tensor_scale: None, written_scale: None, workspace: None }
    }

    setters! {
        /// Scale of the whole tensor, f32, where the problem says that the caller gives it.
        tensor_scale: impl Into<Option<DevSlice<'a>>> => tensor_scale;
        /// The tensor's scale that is written, f32.
        written_scale: impl Into<Option<DevSliceMut<'a>>> => written_scale;
        /// Scratch of the plan's size.
        workspace: impl Into<Option<DevSliceMut<'a>>> => workspace;
    }
}

impl<'a> ScoreArgs<'a> {
    setters! {
        /// The elementwise bias.
        bias: impl Into<Option<DevSlice<'a>>> => bias;
        /// Slopes of ALiBi, f32 `[num_heads_q]` or `[batch, num_heads_q]`.
        alibi_slopes: impl Into<Option<DevSlice<'a>>> => alibi_slopes;
        /// Learnable sinks, f32 `[num_heads_q]`.
        sink: impl Into<Option<DevSlice<'a>>> => sink;
        /// Factor of an FP8 Q, f32 `[1]` or `[batch, num_heads_kv]`.
        descale_q: impl Into<Option<DevSlice<'a>>> => descale_q;
        /// Factor of an FP8 K, f32 `[1]` or `[batch, num_heads_kv]`.
        descale_k: impl Into<Option<DevSlice<'a>>> => descale_k;
        /// Factor of an FP8 V, f32 `[1]` or `[batch, num_heads_kv]`.
        descale_v: impl Into<Option<DevSlice<'a>>> => descale_v;
        /// Scales of Q's blocks.
        block_scale_q: impl Into<Option<DevSlice<'a>>> => block_scale_q;
        /// Scales of K's blocks.
        block_scale_k: impl Into<Option<DevSlice<'a>>> => block_scale_k;
        /// Scales of V's blocks.
        block_scale_v: impl Into<Option<DevSlice<'a>>> => block_scale_v;
        /// The tensors that score and mask capture.
        captured: &'a [DevSlice<'a>] => captured;
        /// The numbers that score and mask capture.
        numbers: &'a [Number] => numbers;
        /// Position of the random generator of dropout.
        dropout: impl Into<Option<DropoutSeed>> => dropout;
    }
}

impl<'a> MaskArgs<'a> {
    setters! {
        /// Endpoints of the intervals, i32 `[batch or 1, heads, endpoints, seqlen_q]`, packed `[heads, endpoints,
        /// total_q]`.
        intervals: impl Into<Option<DevSlice<'a>>> => intervals;
        /// Words of the mask as bits, u32 `[batch or 1, heads, seqlen_q, words]`, packed `[heads, total_q, words]`.
        bits: impl Into<Option<DevSlice<'a>>> => bits;
        /// Number of blocks in each row of the partial list, i32 `[batch or 1, heads, blocks_q]`.
        kv_num_blocks: impl Into<Option<DevSlice<'a>>> => kv_num_blocks;
        /// Indices of the blocks in the partial list, i32 `[batch or 1, heads, blocks_q, max_blocks]`.
        kv_indices: impl Into<Option<DevSlice<'a>>> => kv_indices;
        /// Number of blocks in each row of the full list, i32 `[batch or 1, heads, blocks_q]`.
        full_kv_num_blocks: impl Into<Option<DevSlice<'a>>> => full_kv_num_blocks;
        /// Indices of the blocks in the full list, i32 `[batch or 1, heads, blocks_q, max_blocks]`.
        full_kv_indices: impl Into<Option<DevSlice<'a>>> => full_kv_indices;
    }

    /// The tensors that are given: intervals, bits, and counts and indices of the partial and the full list.
    pub(crate) fn tensors(&self) -> [Option<DevSlice<'a>>; 6] {
        [
            self.intervals,
            self.bits,
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
        ]
    }
}

impl<'a> CacheArgs<'a> {
    setters! {
        /// New keys, which the call appends to the cache.
        k_new: impl Into<Option<DevSlice<'a>>> => k_new;
        /// New values, which the call appends to the cache unless V lies in K.
        v_new: impl Into<Option<DevSlice<'a>>> => v_new;
        /// Cosines of the rotary embedding.
        cos: impl Into<Option<DevSlice<'a>>> => cos;
        /// Sines of the rotary embedding.
        sin: impl Into<Option<DevSlice<'a>>> => sin;
        /// Words of the tree mask, u32 `[batch, seqlen_q, words]`, or packed `[total_q, words]`.
        tree_mask: impl Into<Option<DevSlice<'a>>> => tree_mask;
    }
}

impl<'a> FwdArgs<'a> {
    setters! {
        /// LSE, iff the problem writes it.
        lse: impl Into<Option<DevSliceMut<'a>>> => lse;
        /// Lengths and positions of the sequences.
        seq: SeqArgs<'a> => seq;
        /// Operands of the score.
        score: ScoreArgs<'a> => score;
        /// Tensors of the masks.
        masks: MaskArgs<'a> => masks;
        /// Scales of K, one for each row.
        k_scale: impl Into<Option<CacheSlice<'a>>> => k_scale;
        /// Scales of V, one for each row.
        v_scale: impl Into<Option<CacheSlice<'a>>> => v_scale;
        /// Operands of a call with a KV cache.
        cache: CacheArgs<'a> => cache;
        /// Factor of FP8 O, f32 `[1]`, iff the problem has it.
        scale_o: impl Into<Option<DevSlice<'a>>> => scale_o;
        /// The dropout keep mask, iff the problem writes it.
        keep_mask: impl Into<Option<DevSliceMut<'a>>> => keep_mask;
        /// Each row's greatest score, iff the problem writes it.
        row_max: impl Into<Option<DevSliceMut<'a>>> => row_max;
        /// Each head's greatest score, iff the problem writes it.
        head_max: impl Into<Option<DevSliceMut<'a>>> => head_max;
        /// Each key's sum of probabilities, iff the problem writes it.
        key_sum: impl Into<Option<DevSliceMut<'a>>> => key_sum;
        /// The second cache, iff the problem has one.
        second: impl Into<Option<&'a SecondArgs<'a>>> => second;
        /// Scratch of at least the plan's [`workspace`](crate::Plan::workspace), if that is not 0 bytes.
        workspace: impl Into<Option<DevSliceMut<'a>>> => workspace;
    }
}

impl<'a> BwdArgs<'a> {
    /// The tensors that every call has: the inputs of the forward call, its results with the gradient of O, and the
    /// gradients of the inputs.
    ///
    /// ```
    /// use fmha_core::{BwdArgs, DevSlice, DevSliceMut};
    ///
    /// let (q, k, v, o, lse, dout) = ([0f32; 8], [0f32; 8], [0f32; 8], [0f32; 8], [0f32; 2], [0f32; 8]);
    /// let (mut dq, mut dk, mut dv) = ([0f32; 8], [0f32; 8], [0f32; 8]);
    /// let inputs = [&q, &k, &v].map(|x| DevSlice::host(x));
    /// let of_forward = [DevSlice::host(&o), DevSlice::host(&lse), DevSlice::host(&dout)];
    /// let gradients = [&mut dq, &mut dk, &mut dv].map(|x| DevSliceMut::host(x));
    /// let args = BwdArgs::new(inputs, of_forward, gradients);
    /// assert!(args.dlse.is_none() && args.workspace.is_none());
    /// ```
    #[must_use]
    pub fn new(
        [q, k, v]: [DevSlice<'a>; 3],
        [o, lse, dout]: [DevSlice<'a>; 3],
        [dq, dk, dv]: [DevSliceMut<'a>; 3],
    ) -> Self {
        let (seq, score) = (SeqArgs::default(), ScoreArgs::default());
        Self {
            q,
            k,
            v,
            o,
            lse,
            dout,
            dq,
            dk,
            dv,
            seq,
            score,
            masks: MaskArgs::default(),
            dlse: None,
            dbias: None,
            dcaptured: vec![],
            dsink: None,
            workspace: None,
        }
    }

    /// These arguments with `values` in place of a Q, K and V that have scales, whose scales are left out: the call on
    /// [`BwdProblem::over_values`](crate::BwdProblem::over_values). Every output is borrowed.
    #[must_use]
    pub fn over_values<'b>(&'b self, values: [DevSlice<'b>; 3]) -> BwdArgs<'b> {
        let written = |slice: &'b DevSliceMut<'_>| {
            // SAFETY: this is the memory of the caller's slice, which is borrowed as long as the new slice lives and is
            // written only through it.
            unsafe { DevSliceMut::from_raw(slice.space(), slice.as_mut_ptr(), slice.bytes(), slice.elem()) }
        };
        let gradients = [&self.dq, &self.dk, &self.dv].map(written);
        let mut over = BwdArgs::new(values, [self.o, self.lse, self.dout], gradients);
        (over.seq, over.score, over.masks, over.dlse) = (self.seq, self.score, self.masks, self.dlse);
        let score = &mut over.score;
        (score.descale_q, score.descale_k, score.descale_v) = (None, None, None);
        (score.block_scale_q, score.block_scale_k, score.block_scale_v) = (None, None, None);
        over.dbias = self.dbias.as_ref().map(written);
        over.dcaptured = self.dcaptured.iter().map(written).collect();
        over.dsink = self.dsink.as_ref().map(written);
        over.workspace = self.workspace.as_ref().map(written);
        over
    }

    setters! {
        /// Gradient of LSE, f32 and laid out like it, iff the problem has it.
        dlse: impl Into<Option<DevSlice<'a>>> => dlse;
        /// Gradient of the elementwise bias, iff the problem asks for it.
        dbias: impl Into<Option<DevSliceMut<'a>>> => dbias;
        /// Gradients of tensors that the score function captures, dense.
        dcaptured: Vec<DevSliceMut<'a>> => dcaptured;
        /// Gradient of the sinks, f32 `[num_heads_q]`, iff the problem asks for it.
        dsink: impl Into<Option<DevSliceMut<'a>>> => dsink;
        /// Lengths of the sequences.
        seq: SeqArgs<'a> => seq;
        /// Operands of the score, as in the forward call.
        score: ScoreArgs<'a> => score;
        /// Tensors of the masks, as in the forward call.
        masks: MaskArgs<'a> => masks;
        /// Scratch of at least the plan's [`workspace`](crate::Plan::workspace), if that is not 0 bytes.
        workspace: impl Into<Option<DevSliceMut<'a>>> => workspace;
    }
}

impl<'a> CombineArgs<'a> {
    /// Makes arguments of the parts, which all have the problem's strides, and of the combined O.
    #[must_use]
    pub fn new(parts: &'a [PartialResult<'a>], o: DevSliceMut<'a>) -> Self {
        Self { parts, o, lse: None }
    }

    setters! {
        /// The combined LSE, iff the problem writes it.
        lse: impl Into<Option<DevSliceMut<'a>>> => lse;
    }
}
