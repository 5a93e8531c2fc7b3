"""What a store holds, whether it is sound, how fast it is here, and its samples as files again."""
