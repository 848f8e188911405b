//! Derivatives of a score: one backward walk over its graph (reverse accumulation; Griewank and Walther, "Evaluating
//! Derivatives", 2008, chapter 3) that builds expressions, so that they are printed and compiled as the score is.
//!
//! Corners are torch's: `abs'(0) = 0`, `relu'(0) = 0`, equal operands of min and max have half each, clamp has 1 at its
//! bounds. A branch that is not taken adds exactly 0: products with what comes from above are [`Binary::MulZero`].

use super::Function;
use super::graph::{Binary, Graph, Id, Node, Type, Unary, Variable};

/// The derivative of the score with respect to an element that it reads.
#[derive(Clone, Debug, PartialEq)]
pub struct CaptureSlope {
    /// Index of the captured tensor or number among [`Graph::captures`].
    pub capture: usize,
    /// The element's indices; none of a captured number.
    pub at: Vec<Id>,
    /// The node that is the derivative of the score with respect to that element.
    pub slope: Id,
}

/// The derivatives of a score at a pair.
#[derive(Clone, Debug)]
pub struct Slopes {
    /// Graph of all expressions. Captured tensors and numbers keep the names that they have in the function.
    pub graph: Graph,
    /// The node of the derivative `d score / d s`.
    pub score: Id,
    /// One for each float number that is captured, and for each float element that is read.
    pub captures: Vec<CaptureSlope>,
}

impl Function {
    /// The derivatives of a score through `s` and to what it captures; of a mask, which has none, zeros.
    #[must_use]
    pub fn slopes(&self) -> Slopes {
        let mut walk = Walk { graph: self.graph().clone(), above: vec![None; self.graph().nodes().len()] };
        let one = walk.graph.float(1.0);
        if !self.is_mask() {
            walk.above[self.root().index()] = Some(one);
        }
        let zero = walk.graph.float(0.0);
        let (mut score, mut captures) = (zero, vec![]);
        for at in (0..self.graph().nodes().len()).rev() {
            let Some(above) = walk.above[at] else { continue };
            match self.graph().nodes()[at].clone() {
                Node::Variable(Variable::Score) => score = above,
                Node::Number(capture) => {
                    captures.push(CaptureSlope { capture: capture as usize, at: vec![], slope: above });
                }
                Node::Load(capture, at) => {
                    captures.push(CaptureSlope {
                        capture: capture as usize,
                        at: at.into_vec(),
                        slope: above,
                    });
                }
                node => walk.down(Id(at as u32), &node, above),
            }
        }
        captures.reverse();
        Slopes { graph: walk.graph, score, captures }.pruned()
    }
}

impl Slopes {
    /// The graph without nodes that nothing uses.
    fn pruned(self) -> Self {
        let mut roots = vec![self.score];
        for capture in &self.captures {
            roots.push(capture.slope);
            roots.extend(&capture.at);
        }
        let names: Vec<String> = self.graph.captures().iter().map(|capture| capture.name.clone()).collect();
        let mut graph = Graph::default();
        // Every capture keeps its index, even if only the score reads it.
        for capture in self.graph.captures() {
            let known = graph.capture(&capture.name, capture.kind);
            debug_assert!(known.is_ok(), "{names:?} have one kind each");
        }
        let Ok(roots) = graph.copy(&self.graph, &roots) else { return self };
        let mut next = roots.into_iter();
        let mut take = || next.next().unwrap_or(self.score);
        let score = take();
        let mut captures = self.captures;
        for capture in &mut captures {
            capture.slope = take();
            capture.at.iter_mut().for_each(|at| *at = take());
        }
        Self { graph, score, captures }
    }
}

struct Walk {
    graph: Graph,
    /// For each node, the derivative of the score with respect to the node, as far as it is known.
    above: Vec<Option<Id>>,
}

impl Walk {
    fn constant(&self, id: Id) -> Option<f32> {
        match self.graph.node(id) {
            Node::Float(bits) => Some(f32::from_bits(*bits)),
            _ => None,
        }
    }

    fn f(&mut self, op: Unary, a: Id) -> Id {
        // All operations here have float operands.
        self.graph.add(Node::Unary(op, a), Type::Float)
    }

    fn g(&mut self, op: Binary, a: Id, b: Id) -> Id {
        self.graph.add(Node::Binary(op, a, b), if op.compares() { Type::Bool } else { Type::Float })
    }

    fn select(&mut self, condition: Id, yes: Id, no: Id) -> Id {
        self.graph.add(Node::Select(condition, yes, no), Type::Float)
    }

    fn scaled(&mut self, by: f32, a: Id) -> Id {
        let by = self.graph.float(by);
        self.g(Binary::Mul, by, a)
    }

    fn negated(&mut self, a: Id) -> Id {
        match self.constant(a) {
            Some(value) => self.graph.float(-value),
            None => self.f(Unary::Neg, a),
        }
    }

    /// The product `above * slope`, which is 0 if `above` is 0.
    fn times(&mut self, above: Id, slope: Id) -> Id {
        match (self.constant(above), self.constant(slope)) {
            (Some(0.0), _) => self.graph.float(0.0),
            (Some(1.0), _) => slope,
            (_, Some(1.0)) => above,
            (_, Some(-1.0)) => self.negated(above),
            (Some(above), Some(slope)) => self.graph.float(above * slope),
            (_, Some(slope)) if slope.is_finite() => self.scaled(slope, above),
            _ => self.g(Binary::MulZero, above, slope),
        }
    }

    fn add(&mut self, to: Id, term: Id) {
        if self.constant(term) == Some(0.0) || self.graph.type_of(to) != Type::Float {
            return;
        }
        let sum = match self.above[to.index()] {
            None => term,
            Some(sum) => self.g(Binary::Add, sum, term),
        };
        self.above[to.index()] = Some(sum);
    }

    /// Adds `above` to an operand where a condition holds.
    fn add_where(&mut self, to: Id, condition: Id, above: Id) {
        let zero = self.graph.float(0.0);
        let term = self.select(condition, above, zero);
        self.add(to, term);
    }

    /// Adds the contribution of a node to the derivatives of its operands: `above` times the node's own derivatives.
    fn down(&mut self, at: Id, node: &Node, above: Id) {
        let one = self.graph.float(1.0);
        let zero = self.graph.float(0.0);
        match *node {
            Node::Unary(op, x) => self.down_unary(at, op, x, above),
            Node::Binary(op, a, b) => match op {
                Binary::Add => {
                    self.add(a, above);
                    self.add(b, above);
                }
                Binary::Sub => {
                    self.add(a, above);
                    let below = self.negated(above);
                    self.add(b, below);
                }
                Binary::Mul | Binary::MulZero => {
                    let (to_a, to_b) = (self.times(above, b), self.times(above, a));
                    self.add(a, to_a);
                    self.add(b, to_b);
                }
                Binary::Div => {
                    let inverse = self.g(Binary::Div, one, b);
                    let to_a = self.times(above, inverse);
                    self.add(a, to_a);
                    let ratio = self.g(Binary::Div, at, b);
                    let slope = self.negated(ratio);
                    let to_b = self.times(above, slope);
                    self.add(b, to_b);
                }
                Binary::Mod => {
                    self.add(a, above);
                    let ratio = self.g(Binary::Div, a, b);
                    let whole = self.f(Unary::Floor, ratio);
                    let slope = self.negated(whole);
                    let to_b = self.times(above, slope);
                    self.add(b, to_b);
                }
                Binary::Min | Binary::Max => {
                    let half = self.scaled(0.5, above);
                    let equal = self.g(Binary::Eq, a, b);
                    let shared = self.select(equal, half, zero);
                    for (operand, other) in [(a, b), (b, a)] {
                        let is_it =
                            self.g(if op == Binary::Min { Binary::Lt } else { Binary::Gt }, operand, other);
                        let term = self.select(is_it, above, shared);
                        self.add(operand, term);
                    }
                }
                Binary::Pow => {
                    let less = self.g(Binary::Sub, b, one);
                    let power = self.g(Binary::Pow, a, less);
                    let slope = self.g(Binary::MulZero, b, power);
                    let to_a = self.times(above, slope);
                    self.add(a, to_a);
                    let log = self.f(Unary::Log, a);
                    let slope = self.g(Binary::MulZero, at, log);
                    let to_b = self.times(above, slope);
                    self.add(b, to_b);
                }
                _ => {}
            },
            Node::Select(condition, yes, no) => {
                self.add_where(yes, condition, above);
                let term = self.select(condition, zero, above);
                self.add(no, term);
            }
            Node::Clamp(x, low, high) => {
                let above_low = self.g(Binary::Ge, x, low);
                let below_high = self.g(Binary::Le, x, high);
                let inside = self.graph.add(Node::Binary(Binary::And, above_low, below_high), Type::Bool);
                self.add_where(x, inside, above);
                let is_below = self.g(Binary::Lt, x, low);
                let ordered = self.g(Binary::Le, low, high);
                let at_low = self.graph.add(Node::Binary(Binary::And, is_below, ordered), Type::Bool);
                self.add_where(low, at_low, above);
                let is_above = self.g(Binary::Gt, x, high);
                let crossed = self.g(Binary::Lt, high, low);
                let at_high = self.graph.add(Node::Binary(Binary::Or, is_above, crossed), Type::Bool);
                self.add_where(high, at_high, above);
            }
            _ => {}
        }
    }

    fn down_unary(&mut self, at: Id, op: Unary, x: Id, above: Id) {
        let one = self.graph.float(1.0);
        let slope = match op {
            Unary::Neg => self.graph.float(-1.0),
            Unary::Abs => self.f(Unary::Sign, x),
            Unary::Exp => at,
            Unary::Exp2 => self.scaled(std::f32::consts::LN_2, at),
            Unary::Log => self.g(Binary::Div, one, x),
            Unary::Log2 => {
                let log2_e = self.graph.float(std::f32::consts::LOG2_E);
                self.g(Binary::Div, log2_e, x)
            }
            Unary::Sin => self.f(Unary::Cos, x),
            Unary::Cos => {
                let sin = self.f(Unary::Sin, x);
                self.negated(sin)
            }
            Unary::Tanh => {
                // The form (1 - t)(1 + t) keeps small slopes, for which 1 - t^2 would lose digits.
                let (less, more) = (self.g(Binary::Sub, one, at), self.g(Binary::Add, one, at));
                self.g(Binary::Mul, less, more)
            }
            Unary::Erf => {
                let square = self.g(Binary::Mul, x, x);
                let below = self.negated(square);
                let bell = self.f(Unary::Exp, below);
                self.scaled(std::f32::consts::FRAC_2_SQRT_PI, bell)
            }
            Unary::Sigmoid => {
                let rest = self.g(Binary::Sub, one, at);
                self.g(Binary::Mul, at, rest)
            }
            Unary::Relu => {
                let zero = self.graph.float(0.0);
                let is_above = self.g(Binary::Gt, x, zero);
                return self.add_where(x, is_above, above);
            }
            Unary::Sqrt => {
                let half = self.graph.float(0.5);
                self.g(Binary::Div, half, at)
            }
            Unary::Rsqrt => {
                let ratio = self.g(Binary::Div, at, x);
                self.scaled(-0.5, ratio)
            }
            // The slope of a step function is 0 wherever it exists.
            Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Not | Unary::BitNot => return,
        };
        let term = self.times(above, slope);
        self.add(x, term);
    }
}
