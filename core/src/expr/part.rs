//! Rewrites functions of a whole for a call that computes a part of it: positions are those of the part plus captured
//! numbers.

use super::graph::{Binary, CaptureKind, Graph, Id, Node, Type, Variable};
use super::{ExprError, Function};

impl Function {
    /// Rewrites the function for a part of a larger whole. `name` returns the name of a captured integer for a
    /// variable: a position becomes the part's own position plus that integer, a length becomes the integer itself. A
    /// variable without a name is unchanged.
    ///
    /// # Errors
    /// A name that is another capture already, and more nodes than a function may have.
    pub(crate) fn in_part<'a>(&self, name: impl Fn(Variable) -> Option<&'a str>) -> Result<Self, ExprError> {
        let from = self.graph();
        let mut to = Graph::default();
        let mut places: Vec<Id> = Vec::with_capacity(from.nodes().len());
        for (at, node) in from.nodes().iter().enumerate() {
            let value = from.type_of(Id(at as u32));
            let capture = |to: &mut Graph, at: u32| {
                let capture = &from.captures()[at as usize];
                to.capture(&capture.name, capture.kind)
            };
            let place = match node {
                &Node::Variable(variable) => match name(variable) {
                    None => to.variable(variable),
                    Some(name) => {
                        let number = to.capture(name, CaptureKind::Number(Type::Int))?;
                        let number = to.number(number);
                        match variable {
                            Variable::SeqlenQ | Variable::SeqlenK => number,
                            _ => {
                                let own = to.variable(variable);
                                to.binary(Binary::Add, own, number)?
                            }
                        }
                    }
                },
                &Node::Number(at) => {
                    let capture = capture(&mut to, at)?;
                    to.number(capture)
                }
                Node::Load(at, indices) => {
                    let capture = capture(&mut to, *at)?;
                    to.add(Node::Load(capture, indices.iter().map(|id| places[id.index()]).collect()), value)
                }
                other => {
                    let own = other.map(|operand| places[operand.index()]);
                    to.add(own, value)
                }
            };
            places.push(place);
        }
        Self::of(&to, places[self.root().index()])
    }
}
