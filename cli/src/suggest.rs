//! "Did you mean": the option, command or value of ours that is nearest to a wrong one.

use clap::error::{ContextKind, ContextValue};

/// Words of other libraries, each with the word of this command.
const ELSEWHERE: &[(&str, &str)] = &[
    ("attn_bias", "--bias e"),
    ("attn_mask", "--mask, or --bias e"),
    ("causal", "--mask causal"),
    ("dropout", "--p-drop"),
    ("dropout_p", "--p-drop"),
    ("is_causal", "--mask causal"),
    ("mask_mod", "--keep"),
    ("scale", "--softmax-scale"),
    ("score_mod", "--score"),
    ("sm_scale", "--softmax-scale"),
    ("window_size", "--mask b:LEFT,RIGHT"),
];

/// Least similarity of two words, from 0 to 1: `bf61` and `bf16` reach it, `int8` and `bf16` do not.
const ALIKE: f64 = 0.85;

/// Addition to the refusal of an option or a command: `; did you mean --mask?`, or nothing.
pub(super) fn option(error: &clap::Error) -> String {
    let given = text(error, ContextKind::InvalidArg).unwrap_or_default();
    let name = given.trim_start_matches('-').replace('-', "_");
    if let Some((_, ours)) = ELSEWHERE.iter().find(|(theirs, _)| *theirs == name) {
        return meant(ours);
    }
    let kinds = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    kinds.into_iter().find_map(|kind| text(error, kind)).map_or_else(String::new, |word| meant(&word))
}

/// Addition to `said`, the refusal of a value: the valid values.
pub(super) fn value(error: &clap::Error, said: &str) -> String {
    let Some(given) = text(error, ContextKind::InvalidValue) else { return String::new() };
    let listed = said.split_once(&format!("`{given}`")).map_or("", |(_, rest)| rest);
    nearest(&given, listed).map_or_else(String::new, meant)
}

/// Word in a list that is most similar to `given`, if one is similar enough.
fn nearest<'a>(given: &str, listed: &'a str) -> Option<&'a str> {
    let words = listed.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    words
        .filter(|word| word.len() > 2 && *word != given)
        .map(|word| (strsim::jaro(given, word), word))
        .filter(|(alike, _)| *alike > ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, word)| word)
}

fn meant(word: &str) -> String {
    format!("; did you mean {word}?")
}

/// Word of an error's context; of several, clap puts the most similar last.
fn text(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(word) => Some(word.clone()),
        ContextValue::Strings(words) => words.last().cloned(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_named_where_one_is_near() {
        let listed = "is no type (known: fp32, fp16, bf16, e4m3fn, e5m2)";
        assert_eq!(nearest("bf61", listed), Some("bf16"));
        assert_eq!(nearest("e4m3fm", listed), Some("e4m3fn"));
        assert_eq!(nearest("int8", listed), None);
        assert_eq!(nearest("1x", "is not a whole number"), None);
    }
}
