//! Arguments of a call, made from the tensors that every call has; setters take the rest.

use super::{
    BwdArgs, CombineArgs, DevSlice, DevSliceMut, IndexLossArgs, MaskArgs, PartialResult, QuantizeArgs,
    ScoreArgs, SeqArgs,
};

impl<'a> IndexLossArgs<'a> {
    /// Operands of every loss of an indexer: q, k and weights, its lists, and their target.
    #[must_use]
    pub fn new([q, k, weights]: [DevSlice<'a>; 3], indices: DevSlice<'a>, target: DevSlice<'a>) -> Self {
        Self {
            q,
            k,
            weights,
            indices,
            target,
            k_scale: None,
            dloss: None,
            loss: None,
            dq: None,
            dk: None,
            dweights: None,
            workspace: None,
        }
    }
}

impl<'a> QuantizeArgs<'a> {
    /// A tensor, and where its elements and the scales of its blocks go.
    #[must_use]
    pub fn new(x: DevSlice<'a>, elements: DevSliceMut<'a>, scales: DevSliceMut<'a>) -> Self {
        Self { x, elements, scales, tensor_scale: None, written_scale: None, workspace: None }
    }
}

impl<'a> MaskArgs<'a> {
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
            // SAFETY: the memory of the caller's slice, which is borrowed as long as this one lives and is written
            // through this one alone meanwhile.
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
}

impl<'a> CombineArgs<'a> {
    /// The parts, all with the problem's strides, and the combined O.
    #[must_use]
    pub fn new(parts: &'a [PartialResult<'a>], o: DevSliceMut<'a>) -> Self {
        Self { parts, o, lse: None }
    }
}
