mod mutant;
mod rewrite;
mod tree;
use std::path::Path;
fn main() {
    let root = Path::new("/work/wt/host");
    let mutants = mutant::list(root).unwrap();
    eprintln!("{} mutants", mutants.len());
    let tree = tree::Tree::new(root, root.join("target/schemata"));
    let (programs, left) = tree.build(&mutants).unwrap();
    for p in &programs { println!("{:?}", p.path); }
    println!("{}", left.len());
}
