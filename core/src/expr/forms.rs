//! Parts of functions that have a meaning of their own: bands of a mask; scale, soft-cap and ALiBi of a score.
//!
//! Each is recognised by what it computes, never by a name: [`Function::bands`] and [`Function::score_form`] return the
//! parts for which kernels have a built-in feature, and leave the rest as a function. Captured numbers count where
//! their values are given: a plan does not know them.

use super::eval::{Number, floor_div};
use super::graph::{Binary, CaptureKind, Graph, Id, Node, Stored, Type, Unary, Variable};
use super::{ExprError, Function};
use crate::mask::MaskAlign;

/// Limits of the distance `k - q` between key and query, less `seqlen_k - seqlen_q` where the diagonal ends at the
/// last key; both included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The least distance `k - q` that is visible; `None`: no limit.
    pub lo: Option<i64>,
    /// The greatest distance `k - q` that is visible; `None`: no limit.
    pub hi: Option<i64>,
}

impl Limits {
    /// Whether nothing is hidden.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Limits that hold if both do: the greater of the lower ends, the smaller of the upper ends.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let both = |a: Option<i64>, b: Option<i64>, of: fn(i64, i64) -> i64| match (a, b) {
            (Some(a), Some(b)) => Some(of(a, b)),
            (a, b) => a.or(b),
        };
        Self { lo: both(self.lo, other.lo, i64::max), hi: both(self.hi, other.hi, i64::min) }
    }

    /// The limits of a distance that is greater by `by`.
    #[must_use]
    pub fn moved(self, by: i64) -> Self {
        Self { lo: self.lo.map(|lo| lo.saturating_add(by)), hi: self.hi.map(|hi| hi.saturating_add(by)) }
    }
}

/// A mask divided into bands and a rest: a pair is visible iff all of them show it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bands {
    /// Limits of a key's distance from the diagonal that starts at the first key.
    pub top_left: Limits,
    /// Limits of a key's distance from the diagonal that ends at the last key.
    pub bottom_right: Limits,
    /// The rest of the mask, which is no band; `None` if nothing is left.
    pub rest: Option<Function>,
}

/// A score that kernels have as a built-in feature: `softcap(factor * s)` plus ALiBi's term.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreForm {
    /// Factor by which the scaled score is multiplied.
    pub factor: f64,
    /// Cap of the soft-cap `softcap * tanh(x / softcap)` of that product; `None`: no soft-cap.
    pub softcap: Option<f32>,
    /// ALiBi's term, which is added to the score.
    pub alibi: Option<AlibiTerm>,
}

/// ALiBi's term `-slopes[h] * distance`, where the slopes are a captured tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlibiTerm {
    /// Index of the slopes tensor among the function's captures; its elements are f32.
    pub capture: usize,
    /// Whether slopes are indexed by sequence and head; otherwise by head alone.
    pub per_batch: bool,
    /// Distance of the pair.
    pub distance: Distance,
}

/// The distance by which a pair's slope is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// The distance `q - k`, which is negative beyond the diagonal.
    Signed(MaskAlign),
    /// The distance `|q - k|`.
    Absolute(MaskAlign),
}

/// A sum of `q`, `k` and lengths, each times an integer, and an integer. It is so small that it cannot wrap, whatever
/// the lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Linear {
    q: i64,
    k: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    rest: i64,
}

impl Linear {
    const MOST_FACTOR: i64 = 1 << 12;
    const MOST_REST: i64 = 1 << 40;

    fn whole(rest: i64) -> Option<Self> {
        Self { rest, ..Self::default() }.checked()
    }

    fn checked(self) -> Option<Self> {
        let factors = [self.q, self.k, self.seqlen_q, self.seqlen_k];
        let fits = factors.iter().all(|factor| factor.abs() <= Self::MOST_FACTOR);
        (fits && self.rest.abs() <= Self::MOST_REST).then_some(self)
    }

    fn each(self, other: Self, of: impl Fn(i64, i64) -> i64) -> Option<Self> {
        Self {
            q: of(self.q, other.q),
            k: of(self.k, other.k),
            seqlen_q: of(self.seqlen_q, other.seqlen_q),
            seqlen_k: of(self.seqlen_k, other.seqlen_k),
            rest: of(self.rest, other.rest),
        }
        .checked()
    }

    fn times(self, factor: i64) -> Option<Self> {
        if factor.abs() > Self::MOST_REST {
            return None;
        }
        self.each(self, |own, _| own.saturating_mul(factor))
    }

    fn as_whole(self) -> Option<i64> {
        (self == Self { rest: self.rest, ..Self::default() }).then_some(self.rest)
    }

    /// The form `factor * x + rest`, where x is the distance to a diagonal.
    fn of_distance(self) -> Option<(i64, MaskAlign)> {
        let Self { q, k, seqlen_q, seqlen_k, .. } = self;
        match (k, q + k, seqlen_k, seqlen_q) {
            (0, ..) => None,
            (factor, 0, 0, 0) => Some((factor, MaskAlign::TopLeft)),
            (factor, 0, keys, queries) if keys == -factor && queries == factor => {
                Some((factor, MaskAlign::BottomRight))
            }
            _ => None,
        }
    }
}

/// Known facts of a graph's nodes; each fact follows from those of the node's operands.
struct Forms<'a> {
    graph: &'a Graph,
    linear: Vec<Option<Linear>>,
    /// Values of floats that are constants.
    constant: Vec<Option<f64>>,
    /// Factors of nodes that are multiples of the score.
    scaled: Vec<Option<f64>>,
    /// Whether a captured number is in it.
    has_number: Vec<bool>,
}

impl<'a> Forms<'a> {
    /// Collects the facts of a graph. `numbers` has one entry for each capture: its value, if it is a number and known.
    fn new(graph: &'a Graph, numbers: &[Option<Number>]) -> Self {
        let mut forms = Self { graph, linear: vec![], constant: vec![], scaled: vec![], has_number: vec![] };
        let number = |at: u32| numbers.get(at as usize).copied().flatten();
        for node in graph.nodes() {
            let linear = forms.linear_of(node, number);
            let constant = match (node, linear.and_then(Linear::as_whole)) {
                (Node::Float(bits), _) => Some(f64::from(f32::from_bits(*bits))),
                (Node::Number(at), _) => match number(*at) {
                    Some(Number::Float(value)) => Some(f64::from(value)),
                    _ => None,
                },
                (Node::Cast(Type::Float, a), _) => {
                    // An integer that f32 cannot represent changes its value when it is converted.
                    let whole = forms.linear[a.index()].and_then(Linear::as_whole);
                    whole.filter(|whole| whole.abs() <= 1 << 24).map(|whole| whole as f64)
                }
                (Node::Unary(Unary::Neg, a), _) => forms.constant[a.index()].map(|x| -x),
                _ => None,
            };
            let scaled = match node {
                Node::Variable(Variable::Score) => Some(1.0),
                Node::Unary(Unary::Neg, a) => forms.scaled[a.index()].map(|x| -x),
                Node::Binary(Binary::Mul, a, b) => forms.product(*a, *b).or_else(|| forms.product(*b, *a)),
                Node::Binary(Binary::Div, a, b) => {
                    forms.scaled[a.index()].zip(forms.constant[b.index()]).map(|(x, by)| x / by)
                }
                _ => None,
            };
            let mut has_number = matches!(node, Node::Number(_));
            node.operands(|id| has_number |= forms.has_number[id.index()]);
            forms.linear.push(linear);
            forms.constant.push(constant);
            forms.scaled.push(scaled);
            forms.has_number.push(has_number);
        }
        forms
    }

    fn product(&self, score: Id, factor: Id) -> Option<f64> {
        self.scaled[score.index()].zip(self.constant[factor.index()]).map(|(x, by)| x * by)
    }

    fn linear_of(&self, node: &Node, number: impl Fn(u32) -> Option<Number>) -> Option<Linear> {
        let of = |id: &Id| self.linear[id.index()];
        match node {
            Node::Variable(Variable::Query) => Some(Linear { q: 1, ..Linear::default() }),
            Node::Variable(Variable::Key) => Some(Linear { k: 1, ..Linear::default() }),
            Node::Variable(Variable::SeqlenQ) => Some(Linear { seqlen_q: 1, ..Linear::default() }),
            Node::Variable(Variable::SeqlenK) => Some(Linear { seqlen_k: 1, ..Linear::default() }),
            Node::Int(value) if value.unsigned_abs() <= Linear::MOST_REST.unsigned_abs() => {
                Linear::whole(*value)
            }
            Node::Number(at) => match number(*at) {
                Some(Number::Int(value)) if value.unsigned_abs() <= Linear::MOST_REST.unsigned_abs() => {
                    Linear::whole(value)
                }
                _ => None,
            },
            Node::Unary(Unary::Neg, a) => of(a)?.times(-1),
            Node::Binary(Binary::Add, a, b) => of(a)?.each(of(b)?, |a, b| a + b),
            Node::Binary(Binary::Sub, a, b) => of(a)?.each(of(b)?, |a, b| a - b),
            Node::Binary(Binary::Mul, a, b) => {
                let (a, b) = (of(a)?, of(b)?);
                match (a.as_whole(), b.as_whole()) {
                    (_, Some(factor)) => a.times(factor),
                    (Some(factor), None) => b.times(factor),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Nodes of which the mask is the conjunction, each with the value (true or false) that it must have.
    fn conjuncts(&self, root: Id) -> Vec<(Id, bool)> {
        let mut seen = vec![[false; 2]; self.graph.nodes().len()];
        let (mut all, mut stack) = (vec![], vec![(root, true)]);
        while let Some((id, is_true)) = stack.pop() {
            if std::mem::replace(&mut seen[id.index()][usize::from(is_true)], true) {
                continue;
            }
            match (self.graph.node(id), is_true) {
                (Node::Binary(Binary::And, a, b), true) | (Node::Binary(Binary::Or, a, b), false) => {
                    stack.extend([(*b, is_true), (*a, is_true)]);
                }
                (Node::Unary(Unary::Not, a), _) => stack.push((*a, !is_true)),
                _ => all.push((id, is_true)),
            }
        }
        all
    }

    /// Limits of a key's distance from a diagonal, if comparison `id` is `is_true`, and which diagonal that is.
    fn limits(&self, id: Id, is_true: bool) -> Option<(Limits, MaskAlign)> {
        let Node::Binary(op, a, b) = *self.graph.node(id) else { return None };
        if self.graph.type_of(a) != Type::Int {
            return None;
        }
        let op = if is_true { op } else { opposite(op)? };
        if let (Node::Unary(Unary::Abs, x), Some(most)) = (self.graph.node(a), self.whole(b)) {
            return self.within(*x, op, most);
        }
        if let (Node::Unary(Unary::Abs, x), Some(most)) = (self.graph.node(b), self.whole(a)) {
            return self.within(*x, mirrored(op), most);
        }
        let less = self.linear[a.index()]?.each(self.linear[b.index()]?, |a, b| a - b)?;
        limits(less, op)
    }

    fn whole(&self, id: Id) -> Option<i64> {
        self.linear[id.index()].and_then(Linear::as_whole)
    }

    /// Limits of the distance x for which `|x| op most` holds, and the diagonal from which x counts.
    fn within(&self, x: Id, op: Binary, most: i64) -> Option<(Limits, MaskAlign)> {
        let most = match op {
            Binary::Le => most,
            Binary::Lt => most - 1,
            _ => return None,
        };
        let (x, most) = (self.linear[x.index()]?, Linear::whole(most)?);
        let (upper, align) = limits(x.each(most, |x, most| x - most)?, Binary::Le)?;
        let (lower, _) = limits(x.each(most, |x, most| x + most)?, Binary::Ge)?;
        Some((upper.and(lower), align))
    }

    /// A node as a soft-capped or plain multiple of the score.
    fn softened(&self, id: Id) -> Option<ScoreForm> {
        if let Some(factor) = self.scaled[id.index()] {
            return Some(ScoreForm { factor, softcap: None, alibi: None });
        }
        let Node::Binary(Binary::Mul, a, b) = *self.graph.node(id) else { return None };
        let of = |cap: Id, bent: Id| {
            let Node::Unary(Unary::Tanh, x) = self.graph.node(bent) else { return None };
            let (cap, inner) = (self.constant[cap.index()]?, self.scaled[x.index()]?);
            let softcap = cap as f32;
            let is_cap = softcap.is_normal() && softcap > 0.0 && f64::from(softcap) == cap;
            is_cap.then_some(ScoreForm { factor: cap * inner, softcap: Some(softcap), alibi: None })
        };
        of(a, b).or_else(|| of(b, a))
    }

    /// `factor * slopes[h] * distance`, the factor 1 or -1, with `distance` of [`Distance`].
    fn slope_term(&self, id: Id) -> Option<(i64, AlibiTerm)> {
        match *self.graph.node(id) {
            Node::Unary(Unary::Neg, a) => self.slope_term(a).map(|(factor, term)| (-factor, term)),
            Node::Binary(Binary::Mul, a, b) => self.slope_times(a, b).or_else(|| self.slope_times(b, a)),
            _ => None,
        }
    }

    fn slope_times(&self, slope: Id, distance: Id) -> Option<(i64, AlibiTerm)> {
        let (of_slope, slope) = self.sign(slope);
        let Node::Load(capture, at) = self.graph.node(slope) else { return None };
        let capture = *capture as usize;
        let CaptureKind::Tensor { stored: Stored::F32, .. } = self.graph.captures()[capture].kind else {
            return None;
        };
        let is = |id: Id, variable| *self.graph.node(id) == Node::Variable(variable);
        let per_batch = match at[..] {
            [head] if is(head, Variable::Head) => false,
            [batch, head] if is(batch, Variable::Batch) && is(head, Variable::Head) => true,
            _ => return None,
        };
        let (of_distance, distance) = self.distance(distance)?;
        Some((of_slope * of_distance, AlibiTerm { capture, per_batch, distance }))
    }

    fn sign(&self, id: Id) -> (i64, Id) {
        match *self.graph.node(id) {
            Node::Unary(Unary::Neg, a) => (-1, a),
            _ => (1, id),
        }
    }

    fn distance(&self, id: Id) -> Option<(i64, Distance)> {
        let (sign, id) = self.sign(id);
        let align_of = |whole: Id| {
            let linear = self.linear[whole.index()].filter(|linear| linear.rest == 0)?;
            linear.of_distance().filter(|(factor, _)| factor.abs() == 1)
        };
        match *self.graph.node(id) {
            Node::Cast(Type::Float, whole) => match *self.graph.node(whole) {
                Node::Unary(Unary::Abs, x) => Some((sign, Distance::Absolute(align_of(x)?.1))),
                // The distance is keys minus queries, so the sign is reversed.
                _ => align_of(whole).map(|(factor, align)| (-sign * factor, Distance::Signed(align))),
            },
            Node::Unary(Unary::Abs, x) => match *self.graph.node(x) {
                Node::Cast(Type::Float, whole) => Some((sign, Distance::Absolute(align_of(whole)?.1))),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Limits of a key's distance from a diagonal for which `less op 0` holds, and which diagonal that is.
fn limits(less: Linear, op: Binary) -> Option<(Limits, MaskAlign)> {
    let (factor, align) = less.of_distance()?;
    let (factor, rest, op) =
        if factor > 0 { (factor, less.rest, op) } else { (-factor, -less.rest, mirrored(op)) };
    let at_most = |rest: i64| Limits { lo: None, hi: Some(floor_div(-rest, factor)) };
    let at_least = |rest: i64| Limits { lo: Some(-floor_div(rest, factor)), hi: None };
    let limits = match op {
        Binary::Le => at_most(rest),
        Binary::Lt => at_most(rest + 1),
        Binary::Ge => at_least(rest),
        Binary::Gt => at_least(rest - 1),
        Binary::Eq if rest % factor == 0 => at_most(rest).and(at_least(rest)),
        _ => return None,
    };
    Some((limits, align))
}

/// The integer comparison that is true where `op` is false.
fn opposite(op: Binary) -> Option<Binary> {
    Some(match op {
        Binary::Lt => Binary::Ge,
        Binary::Le => Binary::Gt,
        Binary::Gt => Binary::Le,
        Binary::Ge => Binary::Lt,
        Binary::Eq => Binary::Ne,
        Binary::Ne => Binary::Eq,
        _ => return None,
    })
}

/// The comparison with its two sides exchanged.
fn mirrored(op: Binary) -> Binary {
    match op {
        Binary::Lt => Binary::Gt,
        Binary::Le => Binary::Ge,
        Binary::Gt => Binary::Lt,
        Binary::Ge => Binary::Le,
        same => same,
    }
}

impl Function {
    /// Divides the mask into bounds of diagonals that `takes` accepts, and a rest; `None` for a score, and where no
    /// bound is found. `numbers`: values of captures that are numbers, in their order, where they are known.
    #[must_use]
    pub fn bands(&self, takes: impl Fn(MaskAlign) -> bool, numbers: &[Option<Number>]) -> Option<Bands> {
        if !self.is_mask() {
            return None;
        }
        let forms = Forms::new(self.graph(), numbers);
        let (mut top_left, mut bottom_right) = (Limits::default(), Limits::default());
        let mut rest = vec![];
        for (id, is_true) in forms.conjuncts(self.root()) {
            match forms.limits(id, is_true).filter(|(_, align)| takes(*align)) {
                Some((limits, MaskAlign::TopLeft)) => top_left = top_left.and(limits),
                Some((limits, MaskAlign::BottomRight)) => bottom_right = bottom_right.and(limits),
                None => rest.push((id, is_true)),
            }
        }
        if top_left.is_empty() && bottom_right.is_empty() {
            return None;
        }
        let rest = if rest.is_empty() { None } else { Some(self.all_of(&rest).ok()?) };
        Some(Bands { top_left, bottom_right, rest })
    }

    /// The mask that is true where each of these nodes has the given value.
    fn all_of(&self, parts: &[(Id, bool)]) -> Result<Self, ExprError> {
        let mut graph = Graph::default();
        let mut all: Option<Id> = None;
        for &(id, is_true) in parts {
            let mut part = graph.copy(self.graph(), &[id])?[0];
            if !is_true {
                part = graph.unary(Unary::Not, part)?;
            }
            all = Some(match all {
                Some(all) => graph.binary(Binary::And, all, part)?,
                None => part,
            });
        }
        let root = match all {
            Some(all) => all,
            None => graph.bool(true),
        };
        Self::of(&graph, root)
    }

    /// The score in the form that kernels have as a built-in feature; `None` for a mask, and for a score of another
    /// form. `numbers` as in [`bands`](Self::bands).
    #[must_use]
    pub fn score_form(&self, numbers: &[Option<Number>]) -> Option<ScoreForm> {
        if self.is_mask() {
            return None;
        }
        let forms = Forms::new(self.graph(), numbers);
        let (graph, root) = (self.graph(), self.root());
        let form = match *graph.node(root) {
            Node::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
                let of = |score: Id, term: Id, sign: i64| {
                    let (form, (factor, term)) = (forms.softened(score)?, forms.slope_term(term)?);
                    // ALiBi subtracts the distance times the slope.
                    (sign * factor == -1).then_some(ScoreForm { alibi: Some(term), ..form })
                };
                let sign = if op == Binary::Add { 1 } else { -1 };
                of(a, b, sign).or_else(|| if sign == 1 { of(b, a, 1) } else { None })
            }
            _ => forms.softened(root),
        }?;
        (form.factor.is_normal() && form.factor > 0.0).then_some(form)
    }

    /// The function with captured numbers as constants in those parts that kernels have as built-in features, and in no
    /// others; `None` where no part reads a number. `numbers`: one for each capture, `None` of tensors.
    ///
    /// # Errors
    /// None that a function has which is one already.
    pub fn with_built_in(&self, numbers: &[Option<Number>]) -> Result<Option<Self>, ExprError> {
        let forms = Forms::new(self.graph(), numbers);
        if !forms.has_number[self.root().index()] {
            return Ok(None);
        }
        if !self.is_mask() {
            return if self.score_form(numbers).is_some() {
                self.given(self.root(), numbers).map(Some)
            } else {
                Ok(None)
            };
        }
        let parts = forms.conjuncts(self.root());
        // All bounds must refer to one diagonal: a plan does not know the lengths that a call brings.
        let has_top_left = parts.iter().any(|&(id, is_true)| {
            forms.limits(id, is_true).is_some_and(|(_, align)| align == MaskAlign::TopLeft)
        });
        let align = if has_top_left { MaskAlign::TopLeft } else { MaskAlign::BottomRight };
        let mut graph = Graph::default();
        let (mut all, mut has_changed): (Option<Id>, bool) = (None, false);
        for (id, is_true) in parts {
            let limits = forms.limits(id, is_true).filter(|(_, other)| *other == align);
            let is_band = forms.has_number[id.index()] && limits.is_some();
            has_changed |= is_band;
            let own = if is_band { self.given(id, numbers)? } else { Self::of(self.graph(), id)? };
            let mut part = graph.copy(own.graph(), &[own.root()])?[0];
            if !is_true {
                part = graph.unary(Unary::Not, part)?;
            }
            all = Some(match all {
                Some(all) => graph.binary(Binary::And, all, part)?,
                None => part,
            });
        }
        match all {
            Some(root) if has_changed => Self::of(&graph, root).map(Some),
            _ => Ok(None),
        }
    }

    /// The value of a node if captures have these numbers.
    fn given(&self, root: Id, numbers: &[Option<Number>]) -> Result<Self, ExprError> {
        let (mut graph, mut places) = (Graph::default(), vec![]);
        for (at, node) in self.graph().nodes().iter().enumerate() {
            let here = match node {
                Node::Number(capture) => match numbers.get(*capture as usize).copied().flatten() {
                    Some(Number::Int(value)) => graph.int(value),
                    Some(Number::Float(value)) => graph.float(value),
                    None => {
                        let capture = &self.captures()[*capture as usize];
                        let capture = graph.capture(&capture.name, capture.kind)?;
                        graph.number(capture)
                    }
                },
                Node::Load(capture, indices) => {
                    let capture = &self.captures()[*capture as usize];
                    let capture = graph.capture(&capture.name, capture.kind)?;
                    let indices: Vec<Id> = indices.iter().map(|id| places[id.index()]).collect();
                    graph.load(capture, &indices)?
                }
                other => {
                    let value = self.graph().type_of(Id(at as u32));
                    graph.add(other.map(|id| places[id.index()]), value)
                }
            };
            places.push(here);
        }
        Self::of(&graph, places[root.index()])
    }
}
