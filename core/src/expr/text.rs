//! The text language: a recursive-descent parser with Python's precedence, and a printer whose text parses to the same
//! graph.

use std::fmt::Write as _;

use super::graph::{Binary, CaptureKind, Graph, Id, MAX_RANK, Node, Stored, Type, Unary, Variable};
use super::{ExprError, Function};

/// Deepest nesting of a text that the parser accepts: deeper ones could overflow the thread's stack.
const MAX_DEPTH: usize = 200;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Int(u64),
    Float(f32),
    Symbol(&'static str),
    End,
}

/// Operators, longest first, so that `<=` is not read as `<`.
const SYMBOLS: [&str; 29] = [
    "**", "//", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "%", "<", ">", "&", "|",
    "^", "~", "(", ")", "[", "]", ",", ";", ":", "=",
];

struct Lexed {
    token: Token,
    /// Offset in bytes at which the token begins.
    place: usize,
}

fn error_at(text: &str, place: usize, what: &str) -> ExprError {
    let word: String = text[place..]
        .chars()
        .enumerate()
        .take_while(|&(at, c)| at == 0 || at < 24 && (c.is_alphanumeric() || c == '_' || c == '.'))
        .map(|(_, c)| c)
        .collect();
    let column = text[..place].chars().count() + 1;
    let word = if word.is_empty() { "the end".to_owned() } else { format!("`{word}`") };
    ExprError::new(format!("column {column}, {word}: {what}"))
}

fn lex(text: &str) -> Result<Vec<Lexed>, ExprError> {
    let mut tokens = vec![];
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        }
        let place = at;
        let token = if c.is_ascii_alphabetic() || c == '_' {
            let len = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
            at += len;
            Token::Name(rest[..len].to_owned())
        } else if c.is_ascii_digit() || c == '.' {
            let mut len = 0;
            let bytes = rest.as_bytes();
            while let Some(&byte) = bytes.get(len) {
                let is_sign = matches!(byte, b'+' | b'-') && len > 0 && matches!(bytes[len - 1], b'e' | b'E');
                if byte.is_ascii_alphanumeric() || byte == b'.' || is_sign {
                    len += 1;
                } else {
                    break;
                }
            }
            at += len;
            let word = &rest[..len];
            if let Ok(value) = word.parse::<u64>() {
                Token::Int(value)
            } else if word.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(error_at(text, place, "the integer does not fit 64 bits"));
            } else {
                match word.parse::<f32>() {
                    Ok(value) if value.is_finite() => Token::Float(value),
                    Ok(_) => return Err(error_at(text, place, "the number is larger than f32 holds")),
                    Err(_) => return Err(error_at(text, place, "this is no number")),
                }
            }
        } else if let Some(symbol) = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol)) {
            at += symbol.len();
            Token::Symbol(symbol)
        } else {
            return Err(error_at(text, place, "no operator of the language begins so"));
        };
        tokens.push(Lexed { token, place });
    }
    tokens.push(Lexed { token: Token::End, place: text.len() });
    Ok(tokens)
}

struct Parser<'t> {
    text: &'t str,
    tokens: Vec<Lexed>,
    at: usize,
    depth: usize,
    graph: Graph,
    declared: Vec<(String, CaptureKind)>,
    named: Vec<(String, Id)>,
}

/// The function of a text.
///
/// # Errors
/// The column, and the word that the language does not allow there.
pub(super) fn parse(text: &str) -> Result<Function, ExprError> {
    let mut parser = Parser {
        text,
        tokens: lex(text)?,
        at: 0,
        depth: 0,
        graph: Graph::default(),
        declared: vec![],
        named: vec![],
    };
    let root = parser.program()?;
    Function::of(&parser.graph, root)
}

type Parsed = Result<Id, ExprError>;

impl Parser<'_> {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].token
    }

    fn place(&self) -> usize {
        self.tokens[self.at].place
    }

    fn fail<T>(&self, place: usize, what: impl AsRef<str>) -> Result<T, ExprError> {
        Err(error_at(self.text, place, what.as_ref()))
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn takes(&mut self, symbol: &str) -> bool {
        let found = matches!(self.peek(), Token::Symbol(found) if *found == symbol);
        if found {
            self.next();
        }
        found
    }

    fn takes_word(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Token::Name(found) if found == word);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, symbol: &str) -> Result<(), ExprError> {
        if self.takes(symbol) {
            Ok(())
        } else {
            self.fail(self.place(), format!("`{symbol}` is expected here"))
        }
    }

    fn built(&self, place: usize, built: Result<Id, ExprError>) -> Parsed {
        built.map_err(|error| error_at(self.text, place, &error.to_string()))
    }

    fn program(&mut self) -> Parsed {
        loop {
            let place = self.place();
            if self.takes_word("let") {
                let name = self.new_name()?;
                self.expect("=")?;
                let value = self.expression()?;
                self.expect(";")?;
                self.named.push((name, value));
            } else if matches!(self.peek(), Token::Name(_))
                && matches!(self.tokens.get(self.at + 1).map(|next| &next.token), Some(Token::Symbol(":")))
            {
                let name = self.new_name()?;
                if name.starts_with('_') {
                    return self.fail(place, "a capture's name begins with a letter");
                }
                self.expect(":")?;
                let kind = self.kind()?;
                self.expect(";")?;
                self.declared.push((name, kind));
            } else {
                break;
            }
        }
        let root = self.expression()?;
        match self.peek() {
            Token::End => Ok(root),
            _ => self.fail(self.place(), "the expression ends before this word"),
        }
    }

    fn new_name(&mut self) -> Result<String, ExprError> {
        let place = self.place();
        let Token::Name(name) = self.next() else { return self.fail(place, "a name is expected here") };
        let is_known = self.declared.iter().any(|(known, _)| *known == name)
            || self.named.iter().any(|(known, _)| *known == name)
            || is_reserved(&name);
        if is_known { self.fail(place, "the name is taken") } else { Ok(name) }
    }

    fn kind(&mut self) -> Result<CaptureKind, ExprError> {
        let place = self.place();
        let Token::Name(word) = self.next() else { return self.fail(place, "a type is expected here") };
        if !self.takes("[") {
            return match word.as_str() {
                "float" => Ok(CaptureKind::Number(Type::Float)),
                "int" => Ok(CaptureKind::Number(Type::Int)),
                _ => {
                    self.fail(place, "a number is float or int; a tensor is f32[_], with a `_` for each axis")
                }
            };
        }
        let Some(stored) = Stored::ALL.into_iter().find(|stored| stored.name() == word) else {
            return self.fail(place, "a tensor's type is f32, f16, bf16, i32, i64 or bool");
        };
        let mut rank = 0;
        if !self.takes("]") {
            loop {
                let place = self.place();
                if !self.takes_word("_") {
                    return self.fail(place, "`_` stands for each axis");
                }
                rank += 1;
                if rank > MAX_RANK {
                    return self.fail(place, format!("a tensor has at most {MAX_RANK} axes"));
                }
                if !self.takes(",") {
                    break;
                }
            }
            self.expect("]")?;
        }
        Ok(CaptureKind::Tensor { stored, rank })
    }

    fn expression(&mut self) -> Parsed {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.fail(self.place(), format!("the expression nests deeper than {MAX_DEPTH}"));
        }
        let value = self.or();
        self.depth -= 1;
        value
    }

    fn left(&mut self, ops: &[(&str, Binary)], mut operand: impl FnMut(&mut Self) -> Parsed) -> Parsed {
        let mut value = operand(self)?;
        loop {
            let place = self.place();
            let is_here = |token: &Token, name: &str| match token {
                Token::Symbol(found) => *found == name,
                Token::Name(found) => found == name,
                _ => false,
            };
            let Some(&(_, op)) = ops.iter().find(|(name, _)| is_here(self.peek(), name)) else {
                return Ok(value);
            };
            self.next();
            let right = operand(self)?;
            let built = self.graph.binary(op, value, right);
            value = self.built(place, built)?;
        }
    }

    fn or(&mut self) -> Parsed {
        self.left(&[("or", Binary::Or), ("||", Binary::Or)], Self::and)
    }

    fn and(&mut self) -> Parsed {
        self.left(&[("and", Binary::And), ("&&", Binary::And)], Self::not)
    }

    fn not(&mut self) -> Parsed {
        let mut places = vec![];
        loop {
            let place = self.place();
            if !self.takes_word("not") {
                break;
            }
            places.push(place);
        }
        let mut value = self.comparison()?;
        for place in places.into_iter().rev() {
            let built = self.graph.unary(Unary::Not, value);
            value = self.built(place, built)?;
        }
        Ok(value)
    }

    fn comparison(&mut self) -> Parsed {
        const COMPARISONS: [Binary; 6] =
            [Binary::Lt, Binary::Le, Binary::Gt, Binary::Ge, Binary::Eq, Binary::Ne];
        let here = |token: &Token| {
            COMPARISONS.into_iter().find(|op| matches!(token, Token::Symbol(found) if *found == op.name()))
        };
        let left = self.bit_or()?;
        let Some(op) = here(self.peek()) else { return Ok(left) };
        let place = self.place();
        self.next();
        let right = self.bit_or()?;
        if here(self.peek()).is_some() {
            return self.fail(self.place(), "comparisons are joined by `and`");
        }
        let built = self.graph.binary(op, left, right);
        self.built(place, built)
    }

    fn bit_or(&mut self) -> Parsed {
        self.left(&[("|", Binary::BitOr)], Self::bit_xor)
    }

    fn bit_xor(&mut self) -> Parsed {
        self.left(&[("^", Binary::BitXor)], Self::bit_and)
    }

    fn bit_and(&mut self) -> Parsed {
        self.left(&[("&", Binary::BitAnd)], Self::shift)
    }

    fn shift(&mut self) -> Parsed {
        self.left(&[("<<", Binary::Shl), (">>", Binary::Shr)], Self::sum)
    }

    fn sum(&mut self) -> Parsed {
        self.left(&[("+", Binary::Add), ("-", Binary::Sub)], Self::product)
    }

    fn product(&mut self) -> Parsed {
        let ops = [("*", Binary::Mul), ("/", Binary::Div), ("//", Binary::FloorDiv), ("%", Binary::Mod)];
        self.left(&ops, Self::sign)
    }

    fn sign(&mut self) -> Parsed {
        let mut signs = vec![];
        loop {
            let place = self.place();
            if self.takes("-") {
                // A sign before a constant belongs to the constant.
                let literal = match *self.peek() {
                    Token::Int(value) if value <= 1 << 63 => {
                        Some(self.graph.int((value as i64).wrapping_neg()))
                    }
                    Token::Float(value) => Some(self.graph.float(-value)),
                    Token::Name(ref name) if name == "inf" => Some(self.graph.float(f32::NEG_INFINITY)),
                    _ => None,
                };
                if let Some(literal) = literal {
                    self.next();
                    return self.signed(signs, literal);
                }
                signs.push((place, Unary::Neg));
            } else if self.takes("~") {
                signs.push((place, Unary::BitNot));
            } else if !self.takes("+") {
                break;
            }
        }
        let value = self.primary()?;
        let place = self.place();
        if self.takes("**") {
            return self.fail(place, "powers are written pow(a, b)");
        }
        self.signed(signs, value)
    }

    fn signed(&mut self, signs: Vec<(usize, Unary)>, mut value: Id) -> Parsed {
        for (place, op) in signs.into_iter().rev() {
            let built = self.graph.unary(op, value);
            value = self.built(place, built)?;
        }
        Ok(value)
    }

    fn list(&mut self, end: &str) -> Result<Vec<Id>, ExprError> {
        let mut list = vec![];
        if self.takes(end) {
            return Ok(list);
        }
        loop {
            list.push(self.expression()?);
            if !self.takes(",") {
                break;
            }
        }
        self.expect(end)?;
        Ok(list)
    }

    fn primary(&mut self) -> Parsed {
        let place = self.place();
        match self.next() {
            Token::Int(value) => match i64::try_from(value) {
                Ok(value) => Ok(self.graph.int(value)),
                Err(_) => self.fail(place, "the integer does not fit 64 bits"),
            },
            Token::Float(value) => Ok(self.graph.float(value)),
            Token::Symbol("(") => {
                let value = self.expression()?;
                self.expect(")")?;
                Ok(value)
            }
            Token::Name(name) => self.name(place, &name),
            Token::End => self.fail(place, "a value is expected here"),
            Token::Symbol(_) => self.fail(place, "a value is expected in its place"),
        }
    }

    fn name(&mut self, place: usize, name: &str) -> Parsed {
        if self.takes("(") {
            let operands = self.list(")")?;
            return self.call(place, name, &operands);
        }
        match name {
            "true" => return Ok(self.graph.bool(true)),
            "false" => return Ok(self.graph.bool(false)),
            "inf" => return Ok(self.graph.float(f32::INFINITY)),
            "nan" => return Ok(self.graph.float(f32::NAN)),
            _ => {}
        }
        if let Some(&(_, value)) = self.named.iter().find(|(known, _)| known == name) {
            return Ok(value);
        }
        if let Some(variable) = Variable::ALL.into_iter().find(|variable| variable.name() == name) {
            return Ok(self.graph.variable(variable));
        }
        let Some(&(_, kind)) = self.declared.iter().find(|(known, _)| known == name) else {
            return self.fail(place, "the name is neither s, b, h, q, k, seqlen_q, seqlen_k nor declared");
        };
        let capture = match self.graph.capture(name, kind) {
            Ok(capture) => capture,
            Err(error) => return self.fail(place, error.to_string()),
        };
        match kind {
            CaptureKind::Number(_) => Ok(self.graph.number(capture)),
            CaptureKind::Tensor { .. } => {
                if !self.takes("[") {
                    return self.fail(place, "a tensor is read by its indices: name[..]");
                }
                let at = self.list("]")?;
                let built = self.graph.load(capture, &at);
                self.built(place, built)
            }
        }
    }

    fn call(&mut self, place: usize, name: &str, operands: &[Id]) -> Parsed {
        let unary = Unary::ALL.into_iter().find(|op| op.name() == name && name != "not");
        let binary =
            [Binary::Min, Binary::Max, Binary::Pow, Binary::MulZero].into_iter().find(|op| op.name() == name);
        let cast = [Type::Bool, Type::Int, Type::Float].into_iter().find(|to| to.to_string() == name);
        let built = match (unary, binary, cast, name, operands) {
            (Some(op), _, _, _, &[a]) => self.graph.unary(op, a),
            (_, Some(op), _, _, &[a, b]) => self.graph.binary(op, a, b),
            (_, _, Some(to), _, &[a]) => Ok(self.graph.cast(to, a)),
            (_, _, _, "select", &[condition, yes, no]) => self.graph.select(condition, yes, no),
            (_, _, _, "clamp", &[x, low, high]) => self.graph.clamp(x, low, high),
            _ => {
                let wanted = match (unary, binary, cast, name) {
                    (Some(_), ..) | (_, _, Some(_), _) => 1,
                    (_, Some(_), ..) => 2,
                    (_, _, _, "select" | "clamp") => 3,
                    _ => return self.fail(place, "the language has no function of this name"),
                };
                return self
                    .fail(place, format!("the function takes {wanted} operands, not {}", operands.len()));
            }
        };
        self.built(place, built)
    }
}

/// Whether a word means something without a declaration.
pub(super) fn is_reserved(name: &str) -> bool {
    const WORDS: [&str; 16] = [
        "let", "and", "or", "not", "true", "false", "inf", "nan", "select", "clamp", "min", "max", "pow",
        "mul0", "if", "else",
    ];
    WORDS.contains(&name)
        || ["bool", "int", "float"].contains(&name)
        || Variable::ALL.iter().any(|variable| variable.name() == name)
        || Unary::ALL.iter().any(|op| op.name() == name)
}

/// Precedence of an operator.
fn strength(op: Binary) -> u8 {
    match op {
        Binary::Or => 1,
        Binary::And => 2,
        Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::Eq | Binary::Ne => 4,
        Binary::BitOr => 5,
        Binary::BitXor => 6,
        Binary::BitAnd => 7,
        Binary::Shl | Binary::Shr => 8,
        Binary::Add | Binary::Sub => 9,
        Binary::Mul | Binary::Div | Binary::FloorDiv | Binary::Mod => 10,
        Binary::Min | Binary::Max | Binary::Pow | Binary::MulZero => ATOM,
    }
}

const NOT: u8 = 3;
const SIGN: u8 = 11;
const ATOM: u8 = 12;
/// Nesting depth from which on the printer gives a value a name, so that the text can be parsed again.
const DEEPEST: u32 = 100;

/// Text of a constant with its sign.
fn float(bits: u32) -> String {
    let value = f32::from_bits(bits);
    if value.is_nan() { "nan".to_owned() } else { format!("{value:?}") }
}

/// Text of the value `root`; captures are named by their indices.
pub(super) fn print(graph: &Graph, root: Id, name: impl Fn(usize) -> String) -> String {
    let mut out = String::new();
    for (at, capture) in graph.captures().iter().enumerate() {
        let _ = write!(out, "{}: {}; ", name(at), capture.kind);
    }
    let mut uses = vec![0u32; graph.nodes().len()];
    graph.nodes().iter().for_each(|node| node.operands(|id| uses[id.index()] += 1));
    // Text and precedence of each node, operands first.
    let mut texts: Vec<(String, u8, u32)> = Vec::with_capacity(uses.len());
    let mut lets = 0;
    for (at, node) in graph.nodes().iter().enumerate() {
        let mut depth = 0;
        node.operands(|id| depth = depth.max(texts[id.index()].2 + 1));
        // Text of an operand, in parentheses if its precedence is below `least`.
        let of = |id: Id, least: u8| {
            let (text, strength, _) = &texts[id.index()];
            if *strength < least { format!("({text})") } else { text.clone() }
        };
        let list = |ids: &[Id]| ids.iter().map(|&id| of(id, 0)).collect::<Vec<_>>().join(", ");
        let (text, binds) = match node {
            Node::Variable(variable) => (variable.name().to_owned(), ATOM),
            Node::Bool(value) => (value.to_string(), ATOM),
            Node::Int(value) => (value.to_string(), if *value < 0 { SIGN } else { ATOM }),
            Node::Float(bits) => {
                let text = float(*bits);
                let binds = if text.starts_with('-') { SIGN } else { ATOM };
                (text, binds)
            }
            Node::Number(capture) => (name(*capture as usize), ATOM),
            Node::Load(capture, at) => (format!("{}[{}]", name(*capture as usize), list(at)), ATOM),
            Node::Unary(Unary::Not, a) => (format!("not {}", of(*a, NOT)), NOT),
            Node::Unary(op @ (Unary::Neg | Unary::BitNot), a) => {
                // A constant directly behind a sign would be parsed as one constant with the sign.
                let is_constant = matches!(graph.node(*a), Node::Int(_) | Node::Float(_));
                let operand = if is_constant { format!("({})", of(*a, 0)) } else { of(*a, SIGN) };
                (format!("{}{operand}", op.name()), SIGN)
            }
            Node::Unary(op, a) => (format!("{}({})", op.name(), of(*a, 0)), ATOM),
            Node::Binary(op, a, b) if strength(*op) == ATOM => {
                (format!("{}({})", op.name(), list(&[*a, *b])), ATOM)
            }
            Node::Binary(op, a, b) => {
                let binds = strength(*op);
                let left = of(*a, if op.compares() { binds + 1 } else { binds });
                (format!("{left} {} {}", op.name(), of(*b, binds + 1)), binds)
            }
            Node::Select(a, b, c) => (format!("select({})", list(&[*a, *b, *c])), ATOM),
            Node::Clamp(a, b, c) => (format!("clamp({})", list(&[*a, *b, *c])), ATOM),
            Node::Cast(to, a) => (format!("{to}({})", of(*a, 0)), ATOM),
        };
        let is_leaf = depth == 0;
        if at != root.index() && !is_leaf && (uses[at] > 1 || depth > DEEPEST) {
            let _ = write!(out, "let _{lets} = {text}; ");
            texts.push((format!("_{lets}"), ATOM, 0));
            lets += 1;
        } else {
            texts.push((text, binds, depth));
        }
    }
    out + &texts[root.index()].0
}
