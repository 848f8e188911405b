//! Random requests with a seed: they arrive in bursts, and most begin with one of three long prefixes.

use crate::attention::PAGE;
use crate::engine::Request;
use crate::model::{MAX_LEN, VOCABULARY};

/// Random generator with a seed (Knuth's MMIX multiplier; the upper bits of a linear congruential generator).
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }

    fn tokens(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| self.below(VOCABULARY)).collect()
    }
}

/// Draws `count` requests in order of arrival. None is longer than [`MAX_LEN`], with its answer.
pub(crate) fn requests(seed: u64, count: usize) -> Vec<Request> {
    let mut draw = Draw(seed ^ 0x9e37_79b9_7f4a_7c15);
    // Prompts have a whole page, a token more, or some pages.
    let page = PAGE as usize;
    let prefixes = [page, page + 1, 3 * page + 5].map(|length| draw.tokens(length));
    let mut arrival = 0;
    let request = |_| {
        arrival += [0, 0, 0, 1, 2, 9][draw.below(6)];
        let mut prompt = match draw.below(5) {
            which @ 0..3 => prefixes[which].clone(),
            _ => Vec::new(),
        };
        let rest = 1 + draw.below(50);
        prompt.extend(draw.tokens(rest));
        // An answer's last token is never computed.
        let answer = 1 + draw.below(20.min(MAX_LEN as usize - prompt.len()));
        Request { prompt, answer, arrival }
    };
    (0..count).map(request).collect()
}
