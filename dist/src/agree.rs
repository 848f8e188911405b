//! Agreement of all ranks on one plan and one call.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::group::Group;

const BETWEEN: char = '\x1f';
const SAYS: &str = "says";
const IS_WRONG: &str = "is wrong";
const RUNS: &str = "runs";

/// Text of a field that a rank takes from the other ranks.
pub(crate) const AS_OTHERS: &str = "?";

/// Fields of a problem, each a name and a text.
pub(crate) type Fields = [(String, String)];

/// Time for ranks to send their messages before one of them is blamed. After it, the ranks that agree are
/// known.
pub(crate) const MOMENT: Duration = Duration::from_millis(100);

/// Message of a rank: the problem that it plans, or the call that it runs.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    /// Number of calls that have begun on the rank.
    pub(crate) calls: u64,
    /// Name and text of each field, or what is wrong with the problem.
    fields: Result<Vec<(String, String)>>,
}

impl Said {
    /// Message for a call that begins and that was planned by these fields.
    pub(crate) fn of_call(number: u64, planned: &Fields) -> Self {
        Self { calls: number, fields: Ok(planned.to_vec()) }
    }

    /// Whether the message is of a plan with these fields.
    pub(crate) fn is_of(&self, planned: &Fields) -> bool {
        self.fields.as_deref() == Ok(planned)
    }

    /// Bytes for ranks that also begin a call. A call that is planned as the one before is sent by its number
    /// alone, because all ranks know its fields. Ranks that plan cannot read it.
    pub(crate) fn to_runners(&self, is_again: bool) -> Vec<u8> {
        let own = if is_again { self.calls.to_string().into_bytes() } else { self.to_bytes() };
        [RUNS.as_bytes(), &[BETWEEN as u8], &own].concat()
    }

    /// Message that [`to_runners`](Self::to_runners) has written, where `before` are the fields of the call
    /// before; `None` for other bytes.
    pub(crate) fn of_runner(bytes: &[u8], before: &Fields) -> Option<Self> {
        let own = bytes.strip_prefix(RUNS.as_bytes())?.strip_prefix(&[BETWEEN as u8])?;
        let again = || Some(Self::of_call(str::from_utf8(own).ok()?.parse().ok()?, before));
        Self::read(own).or_else(again)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, words) = match &self.fields {
            Ok(fields) => {
                (SAYS, fields.iter().flat_map(|(field, text)| [field.clone(), text.clone()]).collect())
            }
            Err(error) => (IS_WRONG, vec![error.rank.to_string(), error.field.clone(), error.text.clone()]),
        };
        let all = [vec![kind.to_owned(), self.calls.to_string()], words].concat();
        all.join(&BETWEEN.to_string()).into_bytes()
    }

    /// Message that [`to_bytes`](Self::to_bytes) has written; `None` for other bytes, such as rows of a call.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let begins = |kind: &str| {
            bytes.starts_with(kind.as_bytes()) && bytes.get(kind.len()) == Some(&(BETWEEN as u8))
        };
        if !begins(SAYS) && !begins(IS_WRONG) {
            return None;
        }
        let text = String::from_utf8_lossy(bytes);
        let words: Vec<&str> = text.split(BETWEEN).collect();
        let calls = words[1].parse().ok()?;
        let fields = match &words[2..] {
            [rank, field, text, ..] if words[0] == IS_WRONG => {
                Err(Error::new(rank.parse().ok()?, *field, *text))
            }
            fields => {
                Ok(fields.chunks_exact(2).map(|pair| (pair[0].to_owned(), pair[1].to_owned())).collect())
            }
        };
        Some(Self { calls, fields })
    }
}

/// Error for a rank that plans a problem while another rank runs a planned call.
fn plans_another(rank: u32, other: u32) -> Error {
    let text = format!(
        "rank {rank} plans a problem where rank {other} runs a call that was planned before: \
         rank {rank} has another shape, type, mask or option, or has made fewer or more calls"
    );
    Error::new(rank, "problem", text)
}

/// Error where some ranks plan a problem (`said`) while this rank, of `ranks`, runs a call that was planned
/// by `planned`. The ranks that plan are at fault; this rank is, if they are the majority.
pub(crate) fn out_of_turn(rank: u32, ranks: u32, planned: &Fields, said: &[(u32, Said)]) -> Option<Error> {
    let (other, first) = said.first()?;
    let theirs = match &first.fields {
        Ok(theirs) => theirs,
        Err(error) => return Some(error.clone()),
    };
    let most_plan = said.len() as u32 > ranks / 2;
    let differs = theirs.iter().find_map(|(field, theirs)| {
        let (_, own) = planned.iter().find(|(known, own)| known == field && own != theirs)?;
        Some((field, own, theirs))
    });
    Some(match differs {
        None if most_plan => plans_another(rank, *other),
        None => plans_another(*other, rank),
        Some((field, own, theirs)) if most_plan => {
            let text =
                format!("rank {rank} runs a call of {field} {own}, where most plan a problem of {theirs}");
            Error::new(rank, field, text)
        }
        Some((field, own, theirs)) => {
            let text =
                format!("rank {other} plans a problem of {field} {theirs}, where a call of {own} runs");
            Error::new(*other, field, text)
        }
    })
}

/// Compares every rank's text of each field. A rank with an error of its own sends that error, and all ranks
/// get it.
///
/// # Errors
/// The rank and the field, equal on every rank: a rank with an error, or with another text than the majority.
pub(crate) fn agree(group: &dyn Group, mine: &Result<Vec<(String, String)>>) -> Result<()> {
    agreed(group, mine).map(drop)
}

/// Compares the fields like [`agree`], where a rank may say [`AS_OTHERS`] for some of them. Returns `None` if
/// no rank does. Otherwise returns all fields, taken from the ranks that name them, equal on every rank.
pub(crate) fn agreed(
    group: &dyn Group,
    mine: &Result<Vec<(String, String)>>,
) -> Result<Option<Vec<(String, String)>>> {
    let mine = Said { calls: group.calls(), fields: mine.clone() };
    let all = group.share(&mine.to_bytes())?;
    let mut said = Vec::new();
    for (rank, bytes) in (0..).zip(&all) {
        match Said::read(bytes) {
            Some(other) => said.push(other),
            None => {
                // The rank that runs knows the plan there, and sends the error.
                let end = Instant::now() + 5 * MOMENT;
                while group.failure().is_none() && Instant::now() < end {
                    std::thread::sleep(MOMENT / 10);
                }
                return Err(group.fail(plans_another(group.rank(), rank)));
            }
        }
    }
    let settled = settled(&mut said);
    match disagreement(&said) {
        None => Ok(settled),
        Some(error) => Err(group.fail(error)),
    }
}

/// Puts the first answer of another rank where one says [`AS_OTHERS`]: all fields, where one did.
fn settled(said: &mut [Said]) -> Option<Vec<(String, String)>> {
    let mut settled = said.iter().find_map(|said| said.fields.clone().ok())?;
    let mut is_open = false;
    for (at, (field, text)) in settled.iter_mut().enumerate() {
        let answers = || said.iter().filter_map(|said| said.fields.as_ref().ok()?.get(at));
        is_open |= answers().any(|(known, text)| known == field && text == AS_OTHERS);
        if let Some((_, answer)) = answers().find(|(known, text)| known == field && text != AS_OTHERS) {
            text.clone_from(answer);
        }
    }
    for fields in said.iter_mut().filter_map(|said| said.fields.as_mut().ok()) {
        for ((field, text), (known, answer)) in fields.iter_mut().zip(&settled) {
            if field == known && text == AS_OTHERS {
                text.clone_from(answer);
            }
        }
    }
    is_open.then_some(settled)
}

/// Takes this rank's part in a plan that the others make, where it cannot make its own: on every rank
/// [`FwdPlan::new`](crate::FwdPlan::new) or [`BwdPlan::new`](crate::BwdPlan::new) fails by the error that
/// this returns, which is that of the lowest rank that has one.
#[must_use]
pub fn refuse(group: &dyn Group, error: Error) -> Error {
    agree(group, &Err(error.clone())).err().unwrap_or(error)
}

/// First rank that has an error or another text than the majority.
pub(crate) fn disagreement(all: &[Said]) -> Option<Error> {
    if let Some(error) = all.iter().find_map(|said| said.fields.as_ref().err()) {
        return Some(error.clone());
    }
    // Ranks that agree on all fields may still have made different numbers of calls.
    let fields = |said: &Said| {
        let fields = said.fields.iter().flatten().cloned();
        fields.chain([("calls".to_owned(), said.calls.to_string())]).collect::<Vec<_>>()
    };
    let all: Vec<_> = all.iter().map(fields).collect();
    for (at, (field, first)) in all.first()?.iter().enumerate() {
        let said = |rank: usize| {
            all[rank].get(at).filter(|(other, _)| other == field).map_or("nothing", |(_, text)| text)
        };
        let count = |text: &str| (0..all.len()).filter(|&rank| said(rank) == text).count();
        // Between two ranks, or two halves, the lower rank counts as right.
        let most = (0..all.len())
            .map(said)
            .fold(first.as_str(), |most, text| if count(text) > count(most) { text } else { most });
        if let Some(rank) = (0..all.len()).find(|&rank| said(rank) != most) {
            let text = format!("rank {rank} says {field} {}, but most say {most}", said(rank));
            return Some(Error::new(rank as u32, field, text));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(calls: u64, fields: Result<Vec<(String, String)>>) -> Said {
        Said::read(&Said { calls, fields }.to_bytes()).unwrap()
    }

    fn says(words: &[&str]) -> Said {
        let fields = words.chunks(2).map(|pair| (pair[0].to_owned(), pair[1].to_owned()));
        said(0, Ok(fields.collect()))
    }

    #[test]
    fn the_rank_that_says_something_else_than_most_is_named_with_the_field() {
        let mut all = [says(&["a", "1", "b", "2"]), says(&["a", "1", "b", "2"]), says(&["a", "1", "b", "3"])];
        assert_eq!(disagreement(&all[..2]), None);
        let error = disagreement(&all).unwrap();
        assert_eq!((error.rank, &*error.field), (2, "b"));
        assert!(error.text.contains("rank 2 says b 3, but most say 2"), "{error}");
        all.rotate_right(1);
        assert_eq!(disagreement(&all).unwrap().rank, 0);
    }

    #[test]
    fn a_rank_that_is_wrong_by_itself_comes_before_all_else() {
        let wrong = said(0, Err(Error::new(1, "seqlen_q", "seqlen_q 0")));
        let error = disagreement(&[says(&["a", "1"]), wrong]).unwrap();
        assert_eq!((error.rank, &*error.field), (1, "seqlen_q"));
    }

    #[test]
    fn ranks_that_agree_on_all_else_may_have_made_unlike_numbers_of_calls() {
        let error =
            disagreement(&[said(2, Ok(Vec::new())), said(1, Ok(Vec::new())), said(2, Ok(Vec::new()))]);
        let error = error.unwrap();
        assert_eq!((error.rank, &*error.field), (1, "calls"));
    }

    #[test]
    fn of_those_that_plan_and_those_that_run_the_fewer_are_to_blame_by_the_field_that_differs() {
        let planned = [("a", "1"), ("b", "2")].map(|(field, text)| (field.to_owned(), text.to_owned()));
        let of = |ranks: &[u32], fields: &[&str]| {
            let said: Vec<_> = ranks.iter().map(|&rank| (rank, says(fields))).collect();
            let error = out_of_turn(1, 4, &planned, &said)?;
            Some((error.rank, error.field, error.text))
        };
        assert_eq!(of(&[], &[]), None);
        let (rank, field, text) = of(&[3], &["a", "1", "b", "5"]).unwrap();
        assert_eq!((rank, &*field), (3, "b"), "{text}");
        assert_eq!(text, "rank 3 plans a problem of b 5, where a call of 2 runs");
        let (rank, field, text) = of(&[0, 2, 3], &["a", "1", "b", "5"]).unwrap();
        assert_eq!((rank, &*field), (1, "b"), "{text}");
        assert_eq!(text, "rank 1 runs a call of b 2, where most plan a problem of 5");
        // The fields are equal, on a rank that has made fewer calls: no field names the difference.
        assert_eq!(
            of(&[3], &["a", "1", "b", "2"]).map(|(rank, field, _)| (rank, field)),
            Some((3, "problem".into()))
        );
        let wrong = [(2, said(0, Err(Error::new(2, "v", "v.data is null"))))];
        assert_eq!(out_of_turn(1, 4, &planned, &wrong), Some(Error::new(2, "v", "v.data is null")));
    }
}
