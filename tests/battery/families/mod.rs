//! Families of cases.

mod addresses;
mod backward;
mod bits;
mod code;
mod combine;
mod decode;
pub mod definition;
pub(crate) mod drawn;
mod edges;
mod fp8;
mod guards;
mod heads;
mod laws;
mod lists;
mod masks;
mod pairwise;
mod parts;
mod rare;
mod recipe;
mod rows;
mod scales;
mod small;
mod two_caches;

use crate::case::Case;
pub(crate) use decode::pages;

/// All cases of every family.
pub(crate) fn all() -> Vec<Case> {
    [
        definition::cases(),
        edges::cases(),
        heads::cases(),
        rare::cases(),
        addresses::cases(),
        laws::cases(),
        bits::cases(),
        fp8::cases(),
        guards::cases(),
        backward::cases(),
        code::cases(),
        masks::cases(),
        combine::cases(),
        parts::cases(),
        decode::cases(),
        lists::cases(),
        two_caches::cases(),
        rows::cases(),
        scales::cases(),
        small::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::case::Body;

    /// The error of an invalid problem in a case, if there is one.
    pub(super) fn soundness(case: &Case) -> Result<(), fmha_core::ProblemError> {
        match &case.body {
            Body::Backward(backward) => backward.problem.clone().validate().map(|_| ()),
            Body::Combine(combine) => combine.problem.clone().validate().map(|_| ()),
            _ => case.problem().map_or(Ok(()), |problem| problem.clone().validate().map(|_| ())),
        }
    }

    #[test]
    fn there_are_thousands_of_cases_and_no_two_share_a_name() {
        let cases = all();
        let names: HashSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), cases.len());
        assert!(cases.len() > 2000, "{}", cases.len());
    }

    #[test]
    fn every_problem_is_sound_and_every_list_is_the_same_each_time() {
        let cases = all();
        for case in &cases {
            assert_eq!(soundness(case), Ok(()), "{}", case.name);
        }
        let again = all();
        assert!(cases.iter().zip(&again).all(|(a, b)| a.name == b.name && a.data() == b.data()));
    }
}
