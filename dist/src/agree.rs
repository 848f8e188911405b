//! Whether all ranks mean the same.

use crate::error::{Error, Result};
use crate::group::Group;

const BETWEEN: char = '\x1f';
const SAYS: &str = "says";
const IS_WRONG: &str = "is wrong";

/// Whether bytes are what a rank says of a problem that it plans; else they are of a call.
pub(crate) fn is_said(bytes: &[u8]) -> bool {
    let begins = |kind: &str| bytes.starts_with(kind.as_bytes()) && bytes.get(kind.len()) == Some(&b'\x1f');
    begins(SAYS) || begins(IS_WRONG)
}

/// The fault of a rank that plans a problem where another one runs a call that was planned before.
pub(crate) fn plans_another(rank: u32, other: u32) -> Error {
    let text = format!(
        "rank {rank} plans a problem where rank {other} runs a call that was planned before: \
         rank {rank} has another shape, type, mask or option, or has made fewer or more calls"
    );
    Error::new(rank, "problem", text)
}

/// Compares what every rank says of each field. A rank that is wrong by itself says so, and all hear it.
///
/// # Errors
/// The rank and the field, the same on every rank: one that is wrong, or that says something else than most do.
pub(crate) fn agree(group: &dyn Group, mine: &Result<Vec<(String, String)>>) -> Result<()> {
    let words: Vec<String> = match mine {
        Ok(fields) => fields.iter().flat_map(|(field, text)| [field.clone(), text.clone()]).collect(),
        Err(error) => vec![error.field.clone(), error.text.clone(), error.rank.to_string()],
    };
    let kind = if mine.is_ok() { SAYS } else { IS_WRONG };
    let text = [kind.to_owned(), words.join(&BETWEEN.to_string())].join(&BETWEEN.to_string());
    let all = group.share(text.as_bytes())?;
    if let Some(other) = (0..).zip(&all).find_map(|(rank, bytes)| (!is_said(bytes)).then_some(rank)) {
        return Err(group.fail(plans_another(group.rank(), other)));
    }
    let all: Vec<Vec<String>> = all
        .iter()
        .map(|bytes| String::from_utf8_lossy(bytes).split(BETWEEN).map(str::to_owned).collect())
        .collect();
    match disagreement(&all) {
        None => Ok(()),
        Some(error) => Err(group.fail(error)),
    }
}

/// Takes this rank's part in a plan that the others make, where it cannot make its own: on every rank
/// [`FwdPlan::new`](crate::FwdPlan::new) or [`BwdPlan::new`](crate::BwdPlan::new) fails by the error that this returns, which
/// is that of the lowest rank that has one.
#[must_use]
pub fn refuse(group: &dyn Group, error: Error) -> Error {
    agree(group, &Err(error.clone())).err().unwrap_or(error)
}

/// By rank: whether it is wrong, then field and text by turns.
fn disagreement(all: &[Vec<String>]) -> Option<Error> {
    for (rank, words) in (0..).zip(all) {
        if let [kind, field, text, ..] = &words[..]
            && kind == IS_WRONG
        {
            let rank = words.get(3).and_then(|rank| rank.parse().ok()).unwrap_or(rank);
            return Some(Error::new(rank, field, text));
        }
    }
    let fields = |words: &[String]| -> Vec<(String, String)> {
        words[1..].chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
    };
    let all: Vec<_> = all.iter().map(|words| fields(words)).collect();
    for (at, (field, first)) in all.first()?.iter().enumerate() {
        let said = |rank: usize| {
            all[rank].get(at).filter(|(other, _)| other == field).map_or("nothing", |(_, text)| text)
        };
        let count = |text: &str| (0..all.len()).filter(|&rank| said(rank) == text).count();
        // Of two ranks, or of halves, the lower one is believed.
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

    fn says(words: &[&str]) -> Vec<String> {
        std::iter::once("says").chain(words.iter().copied()).map(str::to_owned).collect()
    }

    #[test]
    fn the_rank_that_says_something_else_than_most_is_named_with_the_field() {
        let all = [says(&["a", "1", "b", "2"]), says(&["a", "1", "b", "2"]), says(&["a", "1", "b", "3"])];
        assert_eq!(disagreement(&all[..2]), None);
        let error = disagreement(&all).unwrap();
        assert_eq!((error.rank, &*error.field), (2, "b"));
        assert!(error.text.contains("rank 2 says b 3, but most say 2"), "{error}");
        let first = [all[2].clone(), all[0].clone(), all[1].clone()];
        assert_eq!(disagreement(&first).unwrap().rank, 0);
    }

    #[test]
    fn a_rank_that_is_wrong_by_itself_comes_before_all_else() {
        let wrong: Vec<String> = ["is wrong", "seqlen_q", "seqlen_q 0", "1"].map(str::to_owned).to_vec();
        let error = disagreement(&[says(&["a", "1"]), wrong]).unwrap();
        assert_eq!((error.rank, &*error.field), (1, "seqlen_q"));
    }
}
