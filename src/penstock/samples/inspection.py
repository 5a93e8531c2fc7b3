"""What a store holds, whether it is sound, and its samples as files again."""
