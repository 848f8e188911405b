//! The README's code is that of the examples, which compile and run.

use std::path::Path;

#[test]
fn every_line_of_the_readmes_code_stands_in_an_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    // Layout and comments are free.
    let bare = |text: &str| {
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        lines
            .flat_map(|line| line.chars().filter(|c| !c.is_whitespace()).collect::<Vec<_>>())
            .collect::<String>()
    };
    let examples: Vec<String> =
        ["attend", "own_tensors"].iter().map(|name| bare(&read(&format!("examples/{name}.rs")))).collect();
    let readme = read("README.md");
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 2);
    for block in blocks {
        for part in block.split("\n\n") {
            // A trailing comma before a closing brace comes and goes with the layout.
            let part = bare(part).replace(",}", "}").replace(",)", ")");
            let found =
                examples.iter().any(|example| example.replace(",}", "}").replace(",)", ")").contains(&part));
            assert!(found, "{part}");
        }
    }
}
