"""Files that released versions have written. Every later version reads them."""
